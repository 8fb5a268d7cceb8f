"""Forks runs that meet their end. Everything is imported once, so that a run starts in the time of its own work.

Reads one JSON order per line: {"run": {...}} forks a run and answers with its process id, {"wait": PID} answers with
its exit code. A run is `jaxdiff` with the given `words`; it has `workdir`, `log` (a pipe) and maybe a `fault`: [kind, n].
"""

import contextlib
import json
import os
import resource
import signal
import sys

import tensorboardX  # noqa: F401
import training_runs  # noqa: F401
from faults import Fault

from jaxdiff import cli
from jaxdiff.cli import runs  # noqa: F401
from jaxdiff.training import distributed, trainer  # noqa: F401


def fork(order):
    """The process id of a run; the child returns from here as that run, to end as any process does."""
    child = os.fork()
    if child:
        return child
    log = os.open(order["log"], os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit fails, as on a full disk
    fault = Fault(order["workdir"], *order.get("fault", ()))
    sys.addaudithook(fault)
    try:
        code = cli.main(order["words"])
    finally:
        fault.failing = False
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print(f"OPERATIONS {fault.count}", flush=True)
    sys.exit(code)


def serve():
    for line in sys.stdin:
        order = json.loads(line)
        ended = "wait" in order
        answer = os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1]) if ended else fork(order["run"])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        serve()
