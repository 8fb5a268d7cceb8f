"""Checkpoints of a training state: written in the background, complete or absent, restored onto any devices.

The only module that uses Orbax. A checkpoint is always restored into the shapes and shardings the current run declares,
never those of the run that saved it, so a checkpoint from 8 devices can be restored on 2 or 1.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from jaxdiff.methods import TrainState
from jaxdiff.training import formats
from jaxdiff.trees import Tree, by_name, mismatches


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message says what is safe and what to do."""


class Checkpoints:
    """The checkpoints of one run: the newest `keep` and the best by `metric` (smaller is better).

    With `read_only`, nothing in the folder is changed, so that a run in progress can be looked at.
    """

    def __init__(self, directory: Path, keep: int = 3, metric: str = "", *, read_only: bool = False) -> None:
        self.directory = Path(directory).absolute()
        rank: Callable[[dict[str, float]], float] | None = None
        rules: list[policies.PreservationPolicy] = [policies.LatestN(keep)]
        if metric:
            rank = lambda metrics: metrics.get(metric, math.inf)  # noqa: E731
            rules.append(policies.BestN(get_metric_fn=rank, reverse=True, n=1, keep_checkpoints_without_metrics=False))
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policies.AnyPreservationPolicy(rules),
            best_fn=rank,  # without it metrics are not written, and the best would be forgotten on restart
            best_mode="min",
            cleanup_tmp_directories=not read_only,
            read_only=read_only,
            create=not read_only,
            save_interval_steps=0 if read_only else 1,
        )
        # replicas share the writing of large arrays; slicing the many small ones would compile a program for each
        arrays = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=2**20)
        registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
        # named here, because a process that has not saved anything yet could not read checkpoint metadata otherwise
        handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
        log = logging.getLogger("absl")
        level = log.level
        if read_only:  # of which Orbax warns
            log.setLevel(logging.ERROR)
        try:
            self._manager = ocp.CheckpointManager(self.directory, options=options, item_handlers=handler)
        finally:
            log.setLevel(level)
        self._metric, self._writing = metric, 0

    def latest(self) -> int | None:
        """The step of the newest complete checkpoint, or None."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """The steps with complete checkpoints."""
        return sorted(self._manager.all_steps())

    def best(self) -> int | None:
        """The step of the least metric, or None if no checkpoint that is kept was evaluated."""
        found = {step: self._manager.metrics(step) or {} for step in self.steps()}
        ranked = {step: metrics[self._metric] for step, metrics in found.items() if self._metric in metrics}
        return min(ranked, key=lambda step: ranked[step], default=None)

    def save(self, step: int, state: Tree, metrics: dict[str, float] | None = None) -> None:
        """Start writing a checkpoint, after the previous one is complete."""
        self.wait()
        self._writing = step
        metrics = (metrics or {}) if self._metric else None
        self._write(lambda: self._manager.save(step, args=ocp.args.PyTreeSave(state), metrics=metrics, force=True))

    def wait(self) -> None:
        """Block until the checkpoint in progress is on disk."""
        self._write(self._manager.wait_until_finished)

    def _write(self, action: Callable[[], object]) -> None:
        try:
            action()
        except (OSError, ValueError, RuntimeError) as error:
            raise CheckpointError(self._write_failure(self._writing, error)) from error

    def _write_failure(self, step: int, error: BaseException) -> str:
        safe = [s for s in self._complete() if s != step]
        kept = f"the checkpoint of step {max(safe)} is complete" if safe else "there is no complete checkpoint yet"
        return (
            f"could not write the checkpoint of step {step} to {self.directory}: {error}. {kept}; "
            "free some space (or lower checkpoint.keep) and rerun the command to resume"
        )

    def restore(self, step: int, declared: TrainState) -> TrainState:
        """The state of that step, in the declared shapes, dtypes and shardings."""
        wanted = self.check(step, declared)
        try:
            how = ocp.checkpoint_utils.construct_restore_args(wanted)
            state = self._manager.restore(step, args=ocp.args.PyTreeRestore(wanted, restore_args=how))
        except Exception as error:
            raise CheckpointError(self._read_failure(step, error)) from error
        return state if wanted is declared else formats.from_first(state, declared)

    def check(self, step: int, declared: TrainState) -> Tree:
        """The structure a step is stored in; a checkpoint of another model or method is rejected."""
        saved = self._names(step)
        wanted: Tree = formats.first_state(declared) if formats.is_first(saved) else declared
        wrong = mismatches(saved, by_name(wanted))
        if wrong:
            raise CheckpointError(
                f"the checkpoint {self.directory / str(step)} belongs to another model or method: {wrong}. Use the "
                "config it was trained with, or another workdir"
            )
        return wanted

    def _read_failure(self, step: int, error: BaseException) -> str:
        others = sorted(s for s in self._complete() if s < step)
        hint = f"to resume from step {others[-1]}" if others else "to start from scratch"
        cause = error.__cause__ or error
        return (
            f"the checkpoint {self.directory / str(step)} cannot be read ({type(cause).__name__}: {str(cause)[:300]}); "
            f"it is damaged or incomplete. Move that folder away {hint}; nothing has been changed"
        )

    def _complete(self) -> list[int]:
        """The steps with complete checkpoints, read from disk again."""
        self._manager.reload()
        return list(self._manager.all_steps())

    def _names(self, step: int) -> dict[str, Tree]:
        """The arrays in a checkpoint by name, as metadata with shapes."""
        try:
            metadata = self._manager.item_metadata(step)
            saved = by_name(getattr(metadata, "tree", metadata))
            if not saved:
                raise ValueError("its metadata is empty")
        except Exception as error:
            raise CheckpointError(self._read_failure(step, error)) from error
        return saved

    def close(self) -> None:
        self._manager.close()
