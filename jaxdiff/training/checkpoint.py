"""Checkpoints of a training state: written in the background, complete or absent, restored onto any devices.

The only module that uses Orbax. A checkpoint is always restored into the shapes and shardings the current run declares,
never those of the run that saved it, so a checkpoint from 8 devices can be restored on 2 or 1.

Beside the arrays a checkpoint holds a record, committed with them: its step, its metrics and a digest of its contents,
which a restored state must have. Checkpoints of earlier versions have no record and are not verified.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from jaxdiff.files import is_full
from jaxdiff.methods import TrainState
from jaxdiff.training import formats, orbax_fixes
from jaxdiff.training.peers import is_loss
from jaxdiff.training.verify import state_digest
from jaxdiff.trees import Tree, by_name, mismatches

RECORD = "jaxdiff"  # among the metadata of a checkpoint


orbax_fixes.apply()


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message says what is safe and what to do."""


class OrbaxLog:
    """Orbax's messages go to a file until closed: on a full disk they are hundreds of lines around the one of ours.

    With `read_only` nothing is written, and only errors are shown.
    """

    def __init__(self, path: Path, read_only: bool) -> None:
        self.log = logging.getLogger("absl")
        self.before = self.log.level, self.log.propagate
        self.handler: logging.Handler | None = None
        if read_only:
            self.log.setLevel(logging.ERROR)  # it warns of being read-only
            return
        self.handler = _Quiet(path, delay=True)
        self.handler.setLevel(logging.WARNING)
        self.handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self.log.addHandler(self.handler)
        self.log.propagate = False

    def close(self) -> None:
        if self.handler is not None:
            self.log.removeHandler(self.handler)
            self.handler.close()
        level, self.log.propagate = self.before
        self.log.setLevel(level)


class _Quiet(logging.FileHandler):
    """Says nothing if it cannot be opened or written, as on a full disk."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        with suppress(OSError):
            super().close()


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
        self._log = OrbaxLog(self.directory.parent / "orbax.log", read_only)
        try:
            self._manager = ocp.CheckpointManager(self.directory, options=options, item_handlers=handler)
        except (ValueError, KeyError, TypeError) as error:  # metadata of a checkpoint are read, and damaged
            self._log.close()
            raise CheckpointError(
                f"the checkpoints in {self.directory} cannot be listed: {error}. Move the damaged folder away"
            ) from error
        self._metric, self._writing = metric, 0
        if metric:
            for step in self.steps():
                self._metrics(step)  # damaged ones would let the wrong checkpoints be kept

    def latest(self) -> int | None:
        """The step of the newest complete checkpoint, or None."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """The steps with complete checkpoints."""
        return sorted(self._manager.all_steps())

    def best(self) -> int | None:
        """The step of the least metric, or None if no checkpoint that is kept was evaluated."""
        found = {step: self._metrics(step) for step in self.steps()}
        ranked = {step: metrics[self._metric] for step, metrics in found.items() if self._metric in metrics}
        return min(ranked, key=lambda step: ranked[step], default=None)

    def save(self, step: int, state: Tree, metrics: dict[str, float] | None = None) -> None:
        """Start writing a checkpoint, after the previous one is complete."""
        self.wait()
        self._writing = step
        metrics = (metrics or {}) if self._metric else None
        record = {RECORD: {"step": step, "metrics": metrics or {}, "digest": state_digest(state)}}
        arrays = ocp.args.PyTreeSave(state)
        self._write(lambda: self._manager.save(step, args=arrays, metrics=metrics, force=True, custom_metadata=record))

    def wait(self) -> None:
        """Block until the checkpoint in progress is on disk."""
        self._write(self._manager.wait_until_finished)

    def _write(self, action: Callable[[], object]) -> None:
        try:
            action()
        except (OSError, ValueError, RuntimeError) as error:
            if is_loss(error):
                raise  # not a matter of the disk: another try may find all processes
            raise CheckpointError(self._write_failure(self._writing, error)) from error

    def tell_failures(self, tell: Callable[[str], None]) -> None:
        """Call `tell(message)` as soon as this process cannot write its part of a checkpoint.

        Orbax would first wait for the other processes, which wait for this one.
        """
        wait = self._manager._wait_for_checkpointers

        def told() -> None:
            try:
                wait()
            except (OSError, ValueError, RuntimeError) as error:
                if not is_loss(error):
                    tell(self._write_failure(self._writing, error))
                raise

        self._manager._wait_for_checkpointers = told  # type: ignore[method-assign]

    def _write_failure(self, step: int, error: BaseException) -> str:
        safe = [s for s in self._complete() if s != step]
        kept = f"the checkpoint of step {max(safe)} is complete" if safe else "there is no complete checkpoint yet"
        cause = str(error).split("\n", 1)[0][:300]
        remedy = "free some space (or lower checkpoint.keep)" if is_full(error) else "check the disk"
        return (
            f"could not write the checkpoint of step {step} to {self.directory}: {cause}. {kept}; {remedy} and rerun "
            "the command to resume"
        )

    def restore(self, step: int, declared: TrainState) -> TrainState:
        """The state of that step, in the declared shapes, dtypes and shardings."""
        wanted = self.check(step, declared)
        try:
            how = ocp.checkpoint_utils.construct_restore_args(wanted)
            state = self._manager.restore(step, args=ocp.args.PyTreeRestore(wanted, restore_args=how))
        except Exception as error:
            raise CheckpointError(self._read_failure(step, error)) from error
        state = state if wanted is declared else formats.from_first(state, declared)
        record = self._record(step)
        if record and record["digest"] != state_digest(state):
            raise CheckpointError(self._damage(step, "its contents do not match its checksum"))
        self._check_step(step, int(state.step))
        return state

    def check(self, step: int, declared: TrainState) -> Tree:
        """The structure a step is stored in; a checkpoint of another model, method or step is rejected."""
        self._check_step(step, self._record(step).get("step", step))
        saved = self._names(step)
        wanted: Tree = formats.first_state(declared) if formats.is_first(saved) else declared
        wrong = mismatches(saved, by_name(wanted)) or _other_dtypes(saved, by_name(wanted))
        if wrong:
            raise CheckpointError(
                f"the checkpoint {self.directory / str(step)} belongs to another model or method: {wrong}. Use the "
                "config it was trained with, or another workdir"
            )
        return wanted

    def _read_failure(self, step: int, error: BaseException) -> str:
        cause = error.__cause__ or error
        return self._damage(step, f"{type(cause).__name__}: {str(cause)[:300]}")

    def _damage(self, step: int, how: str) -> str:
        return (
            f"the checkpoint {self.directory / str(step)} cannot be read ({how}); it is damaged or incomplete. "
            f"{self._instead(step)}; nothing has been changed"
        )

    def _instead(self, step: int) -> str:
        others = sorted(s for s in self._complete() if s < step)
        return "Move that folder away " + (f"to resume from step {others[-1]}" if others else "to start from scratch")

    def _check_step(self, step: int, found: int) -> None:
        if found != step:
            raise CheckpointError(
                f"the checkpoint {self.directory / str(step)} holds step {found}: its folder was renamed or copied. "
                f"{self._instead(step)}, or give it its name back"
            )

    def _record(self, step: int) -> dict[str, Any]:
        """What was committed with the arrays of a step; {} in checkpoints of earlier versions."""
        path = self.directory / str(step) / "_CHECKPOINT_METADATA"
        if not path.is_file():
            return {}
        try:
            record = (json.loads(path.read_text(encoding="utf-8")).get("custom_metadata") or {}).get(RECORD) or {}
            return record and {name: record[name] for name in ("step", "metrics", "digest")}
        except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
            raise CheckpointError(self._read_failure(step, error)) from error

    def _metrics(self, step: int) -> dict[str, float]:
        """The metrics of a step; both copies of them must agree."""
        record = self._record(step)
        try:
            found = self._manager.metrics(step) or {}
        except Exception as error:
            raise CheckpointError(self._read_failure(step, error)) from error
        if record and found != record["metrics"]:
            raise CheckpointError(self._damage(step, f"metrics {found} and {record['metrics']}"))
        return found

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
        self._log.close()


def _other_dtypes(saved: dict[str, Tree], wanted: dict[str, Tree]) -> str:
    """The first array that was saved in another dtype; "" if there is none."""
    for name, leaf in wanted.items():
        if str(saved[name].dtype) != str(leaf.dtype):
            return f"{name} is {saved[name].dtype}, expected {leaf.dtype}"
    return ""
