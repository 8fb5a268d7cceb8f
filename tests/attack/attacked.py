"""Runs that are attacked: started from a server that forks them, struck by faults or signals, judged by how they end.

Lost: the newest checkpoint is older than before, or the run cannot be resumed. Wrong: it ends otherwise than the run
that nothing befell. Unclear: it ended by itself with another exit code than the documented ones, or without a message
of one line.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from training_runs import losses

from jaxdiff.training.peers import REFUSED, RETRY

STEPS = 10  # of tiny_run.py
HERE = Path(__file__).parent
SAID = ("jaxdiff train: ", "another process was lost", " failed: ", "received: saved step", "nothing new to save")
HUNG, PATIENCE = "\nHUNG", 240.0
TICK = os.sysconf("SC_CLK_TCK")


class Server:
    """A process that forks runs (attack_server.py)."""

    def __init__(self, logs):
        self.logs, self.runs = Path(logs), 0
        folders = [str(HERE), str(HERE.parent / "training"), str(HERE.parents[1])]
        settings = ("XLA_FLAGS", "JAX_NUMPY_DTYPE_PROMOTION")  # of the tests, which a user does not have
        kept = {name: value for name, value in os.environ.items() if name not in settings}
        cache = kept.get("JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir()) / "jaxdiff-test-cache"))
        environment = {
            **kept,
            "PYTHONPATH": os.pathsep.join(folders),
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "XLA_FLAGS": "--xla_backend_optimization_level=0",
        }
        command = [sys.executable, str(HERE / "attack_server.py")]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=environment, **pipes)
        self.readers = {}

    def ask(self, order):
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def start(self, workdir, fault=(), process=None, port=0):
        """The process id and the log of a run; with `process`, of one of two."""
        self.runs += 1
        log, pipe = self.logs / f"log{self.runs}", self.logs / f"pipe{self.runs}"
        os.mkfifo(pipe)  # not a file, which a limit on the size of files would hit too
        with open(log, "wb") as file:
            self.readers[log] = subprocess.Popen(["cat", str(pipe)], stdout=file)
        argument = "" if process is None else ":sharded"
        words = ["train", f"--config={HERE / 'tiny_run.py'}{argument}", f"--workdir={workdir}"]
        if process is not None:
            words += [f"--coordinator=127.0.0.1:{port}", "--processes=2", f"--process={process}"]
            words += ["--connect_timeout=60", "--silence_timeout=20"]
        order = {"workdir": str(workdir), "log": str(pipe), "words": words, "fault": list(fault)}
        return self.ask({"run": order}), log

    def run(self, workdir, fault=()):
        """The exit code and what the run said."""
        return self.wait(*self.start(workdir, fault))

    def wait(self, child, log):
        """The exit code of a run and its log, which is then complete. A run that no longer does anything is killed."""
        hung = hangs(child)
        if hung:
            os.kill(child, signal.SIGKILL)
        code = self.ask({"wait": child})
        self.readers.pop(log).wait(60)
        said = log.read_text(errors="replace") + HUNG * hung
        log.unlink()
        log.with_name(log.name.replace("log", "pipe")).unlink()
        return code, said

    def pair(self, workdir):
        """Both processes of a run of two."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        return [self.start(workdir, process=i, port=port) for i in (0, 1)]

    def close(self):
        self.process.communicate()


def newest(workdir):
    """The step of the newest complete checkpoint; -1 if there is none."""
    folder = Path(workdir) / "checkpoints"
    return max((int(p.name) for p in folder.iterdir() if p.name.isdigit()), default=-1) if folder.is_dir() else -1


def same(workdir, reference, logged=True):
    """Whether two runs ended alike: the exported parameters, and the loss of every step each time it was taken."""
    exports = [(Path(folder) / "export.safetensors").read_bytes() for folder in (workdir, reference)]
    return exports[0] == exports[1] and (not logged or losses(workdir) == losses(reference))


def is_clear(kind, code, said):
    """A documented exit code and a message, unless the process had no time for one."""
    if code == 0 or HUNG in said:
        return code == 0
    if kind == "peer" and code != RETRY:  # a launcher must start it again
        return False
    if kind in ("kill", "hup"):
        return code == {"kill": -9, "hup": -1}[kind]
    if kind == "term" and code == -15:  # before the run began: the system's own way to end
        return True
    if kind == "int" and code == 130:
        return "interrupted" in said
    return code in (RETRY, REFUSED) and "Traceback" not in said and any(text in said for text in SAID)


def cpu_seconds(pid):
    """What a process has used so far; machines that are busy do not change when a run is struck."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return float("inf")
    return float("inf") if fields[0] in "ZX" else (int(fields[11]) + int(fields[12])) / TICK


def hangs(pid):
    """Waits for the end of a process, or until it has not used the processor for PATIENCE seconds."""
    used, since = 0.0, time.monotonic()
    while (now := cpu_seconds(pid)) < float("inf"):
        if now > used:
            used, since = now, time.monotonic()
        if time.monotonic() > since + PATIENCE:
            return True
        time.sleep(0.01)
    return False


def strike_after(pid, seconds, number):
    """A signal to a process after that much of its work; whether it was still there."""
    while cpu_seconds(pid) < seconds:
        time.sleep(0.005)
    there = cpu_seconds(pid) < float("inf")
    os.kill(pid, number)  # a zombie, if it has ended: the server has not waited for it
    return there
