"""Forks runs that meet their end. Everything is imported once, so that a run starts in the time of its own work.

Reads one JSON order per line: {"run": {...}} forks a run and answers with its process id, {"wait": PID} answers with its
exit code. A run has `workdir`, `log` (a pipe), `changes` to the config, for one of two processes `process` and `port`,
and a `fault`: [kind, n], which strikes at the n-th time the run is about to open a file for writing, make, rename or
remove something in its workdir:

kill, term, int    a signal to itself
full               no file can grow any more (a limit of the system: also for code that is not Python)
readonly           that operation and all later ones fail
deleted            the workdir is removed
"""

import errno
import json
import os
import resource
import shutil
import signal
import sys
import traceback
from pathlib import Path

from training_runs import config_of

from jaxdiff.errors import raised_on_purpose
from jaxdiff.training import distributed, trainer

SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
COUNTED = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link")


class Fault:
    """An audit hook: Python calls it before every such operation."""

    def __init__(self, workdir, kind, at):
        self.workdir, self.kind, self.at = str(workdir), kind, at
        self.count, self.readonly, self.busy = 0, False, False

    def __call__(self, event, arguments):
        if event not in COUNTED or self.busy or not isinstance(arguments[0], str | os.PathLike):
            return
        if not os.fspath(arguments[0]).startswith(self.workdir) or (event == "open" and not arguments[2] & WRITES):
            return
        self.count += 1
        if self.count == self.at:
            self.busy = True
            self.strike()
            self.busy = False
        if self.readonly:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), os.fspath(arguments[0]))

    def strike(self):
        if self.kind in SIGNALS:
            os.kill(os.getpid(), SIGNALS[self.kind])
        elif self.kind == "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        elif self.kind == "deleted":
            shutil.rmtree(self.workdir, ignore_errors=True)
        self.readonly = self.kind == "readonly"


def train(order):
    """The exit code of a run, by the rules of the command line."""
    workdir = Path(order["workdir"])
    fault = Fault(workdir, *(order.get("fault") or ("", 0)))
    sys.addaudithook(fault)
    config = config_of(changes=order["changes"])
    try:
        if "process" in order:
            address = f"127.0.0.1:{order['port']}"
            distributed.connect(address, 2, order["process"], config=config.to_dict(), timeout=120, silence=20)
        with distributed.ending_together():
            result = trainer.train(config, workdir)
    except Exception as error:
        if not raised_on_purpose(error):
            traceback.print_exc()
            return 1
        print(f"ERROR {error}")
        return 2
    print(f"OPERATIONS {fault.count}")
    if "process" in order:
        import jax

        jax.distributed.shutdown()
    return distributed.RETRY if result.stopped else 0


def fork(order):
    child = os.fork()
    if child:
        return child
    log = os.open(order["log"], os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit fails, as on a full disk
    try:
        code = train(order)
    except BaseException:
        traceback.print_exc()
        code = 1
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


for line in sys.stdin:
    received = json.loads(line)
    if "run" in received:
        answer = fork(received["run"])
    else:
        answer = os.waitstatus_to_exitcode(os.waitpid(received["wait"], 0)[1])
    print(json.dumps(answer), flush=True)
