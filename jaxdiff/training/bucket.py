"""Workdirs at URLs, such as gs://bucket/run: a run trains in a local folder that is kept equal to the bucket.

Object stores cannot append to a file, rename a folder, or lock. So the records and checkpoints of the run are copied
from the bucket to a local folder when it starts; while it trains, what has changed there is copied to the bucket every
INTERVAL seconds, and once more at the end. Every object is complete or absent. A checkpoint counts once its marker,
written after its files, is there; one that is incomplete is not resumed from.

Weaker than on a disk: after the machine is lost, checkpoints and log lines of the last INTERVAL seconds (and of the
time to upload) are lost too, and of two processes that find a stale lock at the same instant both may take it over. A
run of several processes must see one folder: it needs the bucket mounted (experiments/launch/jobset.yaml does so).
"""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import jax

from jaxdiff import remote
from jaxdiff.remote import Place, naming
from jaxdiff.training import lock
from jaxdiff.training.lock import Locked, Owner

INTERVAL = 30.0  # seconds between copies to the bucket
STEPS = "checkpoints"  # folder of the checkpoints
MARKER = ".complete"  # after the number of a step: its checkpoint is complete
OUTPUT = ("samples", "tensorboard", "profile", "wandb")  # folders that a run writes and never reads
WRITTEN = (*OUTPUT, STEPS, "averages")  # those that sampling does not read
LOGS = ("metrics.jsonl", "evaluations.jsonl", "history.json", "orbax.log")  # would make each copy another version


def reading(workdir: remote.FilePath, checkpoints: bool = False, logs: bool = False) -> Path:
    """A run's folder to read from: a local one as it is, or a copy of what is at a URL, on request with more of it."""
    return remote.local(workdir, (*(OUTPUT if checkpoints else WRITTEN), *(() if logs else LOGS)))


def has_checkpoint(workdir: remote.FilePath) -> bool:
    """Whether the run at a URL has a complete checkpoint."""
    place = remote.place_of(workdir)
    with naming(place.url, "read"):
        return any(name.startswith(f"{STEPS}/") and name.endswith(MARKER) for name in remote.listing(place, OUTPUT))


def append_line(workdir: remote.FilePath, name: str, write: Callable[[Path], None]) -> None:
    """Let `write(path)` append to a file of a run, also of one in a bucket."""
    if not remote.is_remote(workdir):
        return write(Path(workdir) / name)
    url = remote.url_of(workdir, name)
    with tempfile.TemporaryDirectory(prefix="jaxdiff-") as folder:
        path = Path(folder) / name
        with suppress(FileNotFoundError):
            shutil.copyfile(remote.local(url), path)
        write(path)
        remote.put(path, url)
    return None


@contextmanager
def opened(workdir: remote.FilePath, say: Callable[[str], object] = print) -> Iterator[Path]:
    """The local folder of a run at a URL: filled, locked, copied back while it is used and at the end.

    If the last copy fails, the folder is kept and the error names it.
    """
    if remote.url_of(workdir).startswith(f"{remote.HUB}://"):
        raise ValueError(
            f"--workdir={remote.url_of(workdir)} can be read and not trained in: train in a folder or bucket, then use "
            "jaxdiff push"
        )
    if jax.process_count() > 1:
        raise ValueError(
            f"--workdir={remote.url_of(workdir)}: several processes write one folder, which they must all see; mount "
            "the bucket on every host (as experiments/launch/jobset.yaml does) and give its mount point"
        )
    place = remote.place_of(workdir)
    held = BucketLock(place)
    root = Path(tempfile.mkdtemp(prefix="jaxdiff-"))
    mirror = Mirror(place, root)
    try:
        mirror.fetch()
        mirror.start()
        say(f"training in {root}, which is copied to {place.url} every {INTERVAL:.0f} s and at the end")
        try:
            yield root
        finally:
            mirror.stop()
        shutil.rmtree(root, ignore_errors=True)
        say(f"copied to {place.url}")
    finally:
        held.release()


class Mirror:
    """A local folder and its copy in a bucket."""

    def __init__(self, place: Place, root: Path) -> None:
        self.place, self.root = place, root
        self._known: dict[str, tuple[int, int]] = {}  # size and time of files that are in the bucket as they are here
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def fetch(self) -> None:
        """Copy the run from the bucket, without incomplete checkpoints."""
        with naming(self.place.url, "read"):
            names = [*remote.listing(self.place, OUTPUT)]
        whole = {name.removesuffix(MARKER) for name in names if name.endswith(MARKER)}
        wanted = [name for name in names if name and self._wanted(name, whole)]
        self._incomplete(sorted({step for name in names if (step := self._step_of(name)) and step not in whole}), whole)
        for name in wanted:
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        if wanted:
            with naming(self.place.url, "read"):
                self.place.files.get([self._at(name) for name in wanted], [str(self.root / name) for name in wanted])
        self._known = {name: self._state(name) for name in wanted} | {f"{step}{MARKER}": (0, 0) for step in whole}

    def _incomplete(self, steps: list[str], whole: set[str]) -> None:
        """Checkpoints without a marker are what a process left that was lost; if there are no others, a user's copy."""
        if steps and not whole:
            print(
                f"{self.place.url}: {', '.join(steps)} without a marker {MARKER} are not resumed from (if they were "
                f"copied there by hand, write empty objects {steps[0]}{MARKER})",
                flush=True,
            )
            return
        for step in steps:
            with naming(self.place.url, "write"), suppress(FileNotFoundError):
                self.place.files.rm(self._at(step), recursive=True)

    def _wanted(self, name: str, whole: set[str]) -> bool:
        parts = name.split("/")
        if parts[-1] == lock.FILE or name.endswith(MARKER):
            return False
        return STEPS not in parts[:-1] or self._step_of(name) in whole

    @staticmethod
    def _step_of(name: str) -> str:
        """The folder of the checkpoint that a file belongs to; "" for other files."""
        parts = name.split("/")
        if STEPS not in parts[:-2]:
            return ""
        return "/".join(parts[: parts.index(STEPS) + 2])

    def start(self) -> None:
        """Begin to copy changes in the background."""
        self._thread.start()

    def stop(self) -> None:
        """Copy what is left; an error says where it is kept."""
        self._stopped.set()
        self._thread.join()
        try:
            self.copy()
        except OSError as error:
            raise OSError(
                f"{error}. The run is kept in {self.root}, which is a workdir itself: resume with --workdir={self.root}"
            ) from error

    def _run(self) -> None:
        while not self._stopped.wait(INTERVAL):
            try:
                self.copy()
            except OSError as error:
                print(f"warning: {error}; trying again in {INTERVAL:.0f} s", flush=True)

    def copy(self) -> None:
        """Copy files that are new or have changed, checkpoints whole, and remove checkpoints that are gone here."""
        present = [path.relative_to(self.root).as_posix() for path in self.root.rglob("*") if path.is_file()]
        kept = [name for name in present if not self._passing(name)]
        steps = sorted({step for name in kept if (step := self._step_of(name))})
        for step in steps:
            if f"{step}{MARKER}" not in self._known:
                self._put([name for name in kept if name.startswith(f"{step}/")])
                if (self.root / step).is_dir():
                    self._mark(step)
        self._put([name for name in kept if not self._step_of(name)])
        for marker in [name for name in self._known if name.endswith(MARKER)]:
            if marker.removesuffix(MARKER) not in steps:
                self._remove(marker)

    @staticmethod
    def _passing(name: str) -> bool:
        """Files that are about to get another name, and locks."""
        parts = name.split("/")
        temporary = any(".orbax-checkpoint-tmp" in part for part in parts) or ".part" in parts[-1]
        return temporary or parts[-1].startswith(lock.FILE)

    def _put(self, names: list[str]) -> None:
        with naming(self.place.url, "write"):
            for name in names:
                try:
                    state = self._state(name)
                    if self._known.get(name) != state:
                        self.place.files.put_file(str(self.root / name), self._at(name))
                        self._known[name] = state
                except FileNotFoundError:  # removed here meanwhile, as an old checkpoint
                    continue

    def _mark(self, step: str) -> None:
        with naming(self.place.url, "write"):
            self.place.files.pipe_file(self._at(f"{step}{MARKER}"), b"complete\n")
        self._known[f"{step}{MARKER}"] = (0, 0)

    def _remove(self, marker: str) -> None:
        """Remove a checkpoint, its marker first."""
        step = marker.removesuffix(MARKER)
        with naming(self.place.url, "write"), suppress(FileNotFoundError):
            self.place.files.rm_file(self._at(marker))
            self.place.files.rm(self._at(step), recursive=True)
        self._known = {
            name: state for name, state in self._known.items() if name != marker and not name.startswith(f"{step}/")
        }

    def _at(self, name: str) -> str:
        return f"{self.place.path}/{name}"

    def _state(self, name: str) -> tuple[int, int]:
        found = (self.root / name).stat()
        return found.st_size, found.st_mtime_ns


class BucketLock:
    """The lock of a run in a bucket: an object that only one process can create, and that its holder writes anew
    every lock.BEAT seconds. One that has not changed for lock.PATIENCE seconds is stale."""

    def __init__(self, place: Place) -> None:
        self.place, self.path = place, f"{place.path}/{lock.FILE}"
        self.owner, self._beats = lock.this_process(), 0
        self._released = threading.Event()
        while not self._create():
            self._wait_for_other()
        lock.held[place.url] = self
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def _content(self) -> bytes:
        return json.dumps({**self.owner._asdict(), "beats": self._beats}).encode()

    def _create(self) -> bool:
        """Whether the lock is ours. Looks before and after: not every file system can create an object only once."""
        if self._read():
            return False
        with naming(self.place.url, "write"):
            try:
                self.place.files.pipe_file(self.path, self._content(), mode="create")
            except Exception:  # which error says that it exists differs between file systems
                if self._read():
                    return False
                raise
        return _owner(self._read()) == self.owner

    def _read(self) -> bytes:
        with naming(self.place.url, "read"):
            try:
                return bytes(self.place.files.cat_file(self.path))
            except FileNotFoundError:
                return b""

    def _wait_for_other(self) -> None:
        """Return if the lock is gone or stale, and then removed; raise if its holder is alive."""
        before = self._read()
        other = _owner(before)
        if other is not None and other.machine and other.machine == self.owner.machine:
            if lock.is_alive(other, Path(self.path)):
                raise self._locked(other)
        else:
            print(f"{self.place.url} is locked by {other}: watching for {lock.PATIENCE:.0f} s", flush=True)
            deadline = time.monotonic() + lock.PATIENCE
            while time.monotonic() < deadline:
                time.sleep(min(1.0, lock.PATIENCE / 10))
                now = self._read()
                if not now:
                    return
                if now != before:
                    raise self._locked(_owner(now))
        print(f"removed the lock of a run that has ended: {other or 'unreadable'}", flush=True)
        with naming(self.place.url, "write"), suppress(FileNotFoundError):
            self.place.files.rm_file(self.path)

    def _locked(self, other: Owner | None) -> Locked:
        return Locked(
            f"another run is training in {self.place.url}: {other}. Stop it, wait for it, or choose another --workdir; "
            f"if you are sure that it no longer runs, delete {self.place.url}/{lock.FILE}"
        )

    def _beat(self) -> None:
        while not self._released.wait(lock.BEAT):
            self._beats += 1
            with suppress(Exception):  # the next beat tries again
                self.place.files.pipe_file(self.path, self._content())

    def release(self) -> None:
        """Remove the object, if it is still this process's own."""
        self._released.set()
        lock.held.pop(self.place.url, None)
        self._thread.join()
        with suppress(Exception):  # it becomes stale
            if _owner(self._read()) == self.owner:
                self.place.files.rm_file(self.path)


def _owner(content: bytes) -> Owner | None:
    """The owner that a lock names; None if it cannot be read."""
    try:
        record = json.loads(content)
        return Owner(**{name: record[name] for name in Owner._fields})
    except (ValueError, TypeError, KeyError):
        return None
