"""The folder of a run: created, locked, and given the records that say what the run is."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxdiff import remote
from jaxdiff.data import spec
from jaxdiff.errors import raised_on_purpose
from jaxdiff.files import is_full
from jaxdiff.training import bucket, continuity, distributed, export, lock, snapshots, state
from jaxdiff.training.build import Run
from jaxdiff.training.logs import Logger

# what a disk says of itself, whichever file it was
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE)


def finished(root: Path, steps: int) -> bool:
    """Whether a run reached its last step and was exported."""
    return (root / export.FILE).is_file() and (root / "checkpoints" / str(steps)).is_dir()


def begun(workdir: str | os.PathLike) -> bool:
    """Whether there is a checkpoint to resume from."""
    if remote.is_remote(workdir):
        return bucket.has_checkpoint(workdir)
    return state.has_checkpoint(Path(workdir) / "checkpoints")


@contextmanager
def locked(workdir: str | os.PathLike, quiet: bool = False) -> Iterator[Path]:
    """The run's folder: created, the same for all processes, and closed to other runs; one in a bucket is mirrored."""
    if remote.is_remote(workdir):
        with bucket.opened(workdir, (lambda text: None) if quiet else print) as root:
            yield root
        return
    root = distributed.in_step(lambda: make_folder(workdir))
    with explained(root):
        distributed.check_shared(root)
        held = distributed.in_step(lambda: lock.acquire(root) if jax.process_index() == 0 else None)
        try:
            yield root
        finally:
            if held is not None:
                held.release()


@contextmanager
def explained(root: Path) -> Iterator[None]:
    """A disk that fails is an error of one line, wherever a file of the run is opened, written, moved or removed."""
    try:
        yield
    except OSError as error:
        named = isinstance(error.filename, str | bytes) and root in Path(os.fsdecode(error.filename)).parents
        if raised_on_purpose(error) or not (named or (error.filename is None and error.errno in DISK)):
            raise
        what = error.filename if named else f"files in {root}"
        remedy = "free some space" if is_full(error) else "check the disk and its permissions"
        raise OSError(
            f"cannot read or write {what}: {error.strerror}; {remedy} and rerun the command to resume"
        ) from error


def make_folder(workdir: str | os.PathLike) -> Path:
    """Create the run's folder."""
    root = Path(workdir).absolute()
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"cannot write to workdir {root}: {error}. Choose another --workdir or make it writable"
        ) from error
    return root


def write_records(root: Path, run: Run, first: int = 0) -> None:
    """Write config.json and data.json, drop averages of steps that will be repeated, enable the compilation cache."""
    if jax.process_index() == 0:
        try:
            export.write_config(root, run.config)
            spec.write(root, run.data)
        except OSError as error:
            raise OSError(
                f"cannot write to workdir {root}: {error}. Choose another --workdir or make it writable"
            ) from error
        snapshots.discard_after(root, first)
    if run.config.compile_cache:
        jax.config.update("jax_compilation_cache_dir", str(Path(run.config.compile_cache).expanduser()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def note_changes(root: Path, run: Run, mesh: Mesh, step: int, changes: list[continuity.Change], log: Logger) -> None:
    """Log what has changed since the run was last trained, and record it in its history."""
    for line in continuity.describe(changes, step):
        log.say(line)
    if changes:
        log.event({"event": "change", "step": step, "changed": {c.name: [c.old, c.new] for c in changes}})
    if jax.process_index() == 0:
        continuity.write(root, run, mesh, step, changes)
