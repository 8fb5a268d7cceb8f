"""Checkpoints of a training state: written in the background, complete or absent, restored onto any devices.

The only file that knows Orbax. A restore is always into shapes and shardings the current run declares, never into
those of the run that saved; so a checkpoint of 8 devices restores on 2 or 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from jaxdiff.trees import by_name, misfits


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read, with what is safe and what to do."""


class Checkpoints:
    """The checkpoints of one run: the newest `keep` and the best by `metric` (smaller is better)."""

    def __init__(self, directory: Path, keep: int = 3, metric: str = "") -> None:
        self.directory = Path(directory).absolute()
        rank = (lambda metrics: metrics.get(metric, math.inf)) if metric else None
        rules: list[Any] = [policies.LatestN(keep)]
        if rank:
            rules.append(policies.BestN(get_metric_fn=rank, reverse=True, n=1, keep_checkpoints_without_metrics=False))
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policies.AnyPreservationPolicy(rules),
            best_fn=rank,  # without it the metrics are not written, and the best would not outlive this process
            best_mode="min",
            cleanup_tmp_directories=True,
        )
        # replicas share the writing of large arrays; cutting the many small ones would compile a program for each
        arrays = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=2**20)
        registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
        # named here, or a process that has saved nothing yet could not read what a checkpoint holds
        handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
        self._manager = ocp.CheckpointManager(self.directory, options=options, item_handlers=handler)
        self._ranked, self._writing = bool(metric), 0

    def latest(self) -> int | None:
        """The newest complete checkpoint's step, or None."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, metrics: dict[str, float] | None = None) -> None:
        """Start writing a checkpoint; the one before must have been written whole."""
        self.wait()
        self._writing = step
        metrics = (metrics or {}) if self._ranked else None
        self._write(lambda: self._manager.save(step, args=ocp.args.PyTreeSave(state), metrics=metrics, force=True))

    def wait(self) -> None:
        """Block until the checkpoint in progress is on disk."""
        self._write(self._manager.wait_until_finished)

    def _write(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except (OSError, ValueError, RuntimeError) as error:
            raise CheckpointError(self._write_failure(self._writing, error)) from error

    def _write_failure(self, step: int, error: BaseException) -> str:
        safe = [s for s in self._complete() if s != step]
        kept = f"the checkpoint of step {max(safe)} is complete" if safe else "there is no complete checkpoint yet"
        return (
            f"could not write the checkpoint of step {step} to {self.directory}: {error}. {kept}; "
            "free some space (or lower checkpoint.keep) and run the same command again to go on from there"
        )

    def restore(self, step: int, declared: Any) -> Any:
        """The state of that step, in the declared shapes, dtypes and shardings."""
        self._compare(step, declared)
        try:
            how = ocp.checkpoint_utils.construct_restore_args(declared)
            return self._manager.restore(step, args=ocp.args.PyTreeRestore(declared, restore_args=how))
        except Exception as error:
            raise CheckpointError(self._read_failure(step, error)) from error

    def _read_failure(self, step: int, error: BaseException) -> str:
        others = sorted(s for s in self._complete() if s < step)
        hint = f"to go on from step {others[-1]}" if others else "to start afresh"
        cause = error.__cause__ or error
        return (
            f"the checkpoint {self.directory / str(step)} cannot be read ({type(cause).__name__}: {str(cause)[:300]}); "
            f"it is damaged or incomplete. Move that folder away {hint}, nothing has been changed"
        )

    def _complete(self) -> list[int]:
        """The steps whose checkpoints are complete, from a fresh look at the folder."""
        self._manager.reload()
        return list(self._manager.all_steps())

    def _compare(self, step: int, declared: Any) -> None:
        """Names and shapes in the checkpoint against those declared, before anything is read."""
        try:
            metadata = self._manager.item_metadata(step)
            saved = by_name(getattr(metadata, "tree", metadata))
            if not saved:
                raise ValueError("it says nothing of what it holds")
        except Exception as error:
            raise CheckpointError(self._read_failure(step, error)) from error
        wrong = misfits(saved, by_name(declared))
        if wrong:
            raise CheckpointError(
                f"the checkpoint {self.directory / str(step)} belongs to another model or method: {wrong}. Use the "
                "config it was made with, or another workdir"
            )

    def close(self) -> None:
        self._manager.close()
