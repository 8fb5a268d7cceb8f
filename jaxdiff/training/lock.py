"""One run per workdir: a lock file with the host, process id and start time of the process that trains there.

The lock of a process that has died is recognised and taken over. On the machine that wrote it, its process id and start
time tell. A lock from another machine is watched: its holder touches the file every BEAT seconds, and one that has not
changed for PATIENCE seconds is stale. The file appears complete (a hard link of a finished file), so a lock that cannot
be read is not one that is being written.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

FILE = ".lock"
BEAT, PATIENCE = 15.0, 60.0  # seconds between touches of the file; without one, after which a remote lock is stale
held: dict[Path | str, Releasable] = {}  # by this process, by path or URL


class Locked(RuntimeError):
    """Another process trains in this workdir."""


class Releasable(Protocol):
    """A lock of this process."""

    def release(self) -> None:
        """Give it up."""


class Owner(NamedTuple):
    """A process, as told from every other one."""

    host: str
    machine: str  # the boot and the process namespace in which `pid` has a meaning; "" where unknown
    pid: int
    started: str  # clock ticks since boot; "" where unknown
    since: str  # wall clock, for people
    nonce: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, started {self.since}"


class WorkdirLock:
    """A lock that is held from `acquire` to `release`."""

    def __init__(self, path: Path, owner: Owner) -> None:
        self.path, self.owner = path, owner
        self._released = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()
        held[path] = self

    def _beat(self) -> None:
        while not self._released.wait(BEAT):
            with contextlib.suppress(OSError):  # the workdir may have gone; the run will notice when it writes
                os.utime(self.path)

    def release(self) -> None:
        """Remove the file, if it is still this process's own."""
        self._released.set()
        held.pop(self.path, None)
        with contextlib.suppress(OSError):
            if read(self.path) == self.owner:
                self.path.unlink()


def release_all() -> None:
    """Release every lock of this process, which is about to exit."""
    for each in list(held.values()):
        each.release()


def acquire(workdir: Path) -> WorkdirLock:
    """Lock a workdir, or raise an error that names the process that trains there."""
    path = Path(workdir).absolute() / FILE
    owner = this_process()
    with _one_at_a_time(path.parent):
        while not _create(path, owner):
            other = read(path)
            if other is None:  # released just now, or, on a disk without hard links, still being written
                time.sleep(1.0)
                other = read(path)
            if other is not None and is_alive(other, path):
                here = " (this very process)" if other.pid == os.getpid() and other.machine == owner.machine else ""
                raise Locked(
                    f"another run is training in {path.parent}: {other}{here}. Stop it, wait for it, or choose another "
                    f"--workdir; if you are sure that it no longer runs, delete {path}"
                )
            _remove_stale(path, other)
    return WorkdirLock(path, owner)


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Of several that find a stale lock, one after the other judges it. A disk may lack such locks on folders."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        yield  # the error comes when the lock is written
        return
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def this_process() -> Owner:
    """The identity of this process."""
    since = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    return Owner(socket.gethostname(), _machine(), os.getpid(), _started(os.getpid()), since, uuid.uuid4().hex)


def read(path: Path) -> Owner | None:
    """The owner of a lock; None if there is no lock, or not one of this format."""
    try:
        return Owner(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def is_alive(owner: Owner, path: Path) -> bool:
    """Whether the owner of the lock still runs; takes PATIENCE seconds for a dead one on another machine."""
    if owner.machine and owner.machine == _machine():
        return owner.started == _started(owner.pid)
    if not owner.machine and owner.host == socket.gethostname():  # a system without /proc
        return _exists(owner.pid)
    print(f"{path} is the lock of {owner}: watching for {PATIENCE:.0f} s whether that process still runs", flush=True)
    before, deadline = _touched(path), time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        time.sleep(min(1.0, PATIENCE / 10))
        if _touched(path) != before:
            return read(path) is not None  # touched by its owner, or replaced by another; released if it is gone
    return False


def _create(path: Path, owner: Owner) -> bool:
    """Whether the lock could be created."""
    made = path.with_name(f"{FILE}.{owner.nonce}")
    try:
        made.write_text(json.dumps(owner._asdict()) + "\n", encoding="utf-8")
        try:
            os.link(made, path)
        except FileExistsError:
            return False
        except OSError:  # a disk without hard links, such as a mounted bucket
            return _create_exclusively(path, made.read_text(encoding="utf-8"))
        return True
    except OSError as error:
        raise OSError(
            f"cannot write to workdir {path.parent}: {error}. Choose another --workdir or make it writable"
        ) from error
    finally:
        made.unlink(missing_ok=True)


def _create_exclusively(path: Path, text: str) -> bool:
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        return False
    return True


def _remove_stale(path: Path, stale: Owner | None) -> None:
    """Remove a lock, unless another process has taken it over meanwhile."""
    aside = path.with_name(f"{FILE}.{uuid.uuid4().hex}")
    try:
        path.rename(aside)
    except FileNotFoundError:
        return
    if read(aside) != stale:
        with contextlib.suppress(OSError):
            os.link(aside, path)
    else:
        print(f"removed the lock of a run that has ended: {stale or 'unreadable'}", flush=True)
    aside.unlink(missing_ok=True)


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> str:
    """When a process of this machine started; "" if there is none (or it is a zombie)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _touched(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
