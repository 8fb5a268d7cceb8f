"""What befalls a run: a fault that strikes at its n-th operation on files, by an audit hook of Python.

kill, term, int, hup    a signal to itself
limit                   no file can grow any more, by a limit of the system that binds code other than Python too
full                    the disk that holds the workdir is filled to the last byte
broken                  this operation fails with EIO, once
readonly                this operation and all later ones fail with EROFS
deleted                 the workdir is removed
"""

import errno
import os
import resource
import shutil
import signal

SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT, "hup": signal.SIGHUP}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
COUNTED = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link")
FILLER = "filler"  # beside the workdir


class Fault:
    """Counts how often a run is about to open a file for writing, make, rename or remove something in its workdir, and
    strikes once."""

    def __init__(self, workdir, kind="", at=0):
        self.workdir, self.kind, self.at = str(workdir), kind, at
        self.count, self.failing, self.busy = 0, False, False

    def __call__(self, event, arguments):
        """The audit hook: called before every operation."""
        if event not in COUNTED or self.busy or not isinstance(arguments[0], str | os.PathLike):
            return
        path = os.fspath(arguments[0])
        if not path.startswith(self.workdir) or (event == "open" and not arguments[2] & WRITES):
            return
        self.count += 1
        if self.count == self.at:
            self.busy = True
            print(f"STRUCK at {event} {path.removeprefix(self.workdir)}", flush=True)
            self.strike()
            self.busy = False
            if self.kind == "broken":
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        if self.failing:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    def strike(self):
        if self.kind in SIGNALS:
            os.kill(os.getpid(), SIGNALS[self.kind])
        elif self.kind == "limit":
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        elif self.kind == "full":
            fill(os.path.join(os.path.dirname(self.workdir), FILLER))
        elif self.kind == "deleted":
            shutil.rmtree(self.workdir, ignore_errors=True)
        self.failing = self.kind == "readonly"


def fill(path):
    """Write to a file until the disk is full."""
    with open(path, "ab", buffering=0) as file:
        for size in (2**16, 2**12, 1):
            try:
                while file.write(b"\0" * size):
                    pass
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
