"""Attacks on running processes, seeded and counted: whatever ends a run, the rerun ends like one that nothing befell.

    python -m pytest tests/attack -m slow -n 0 -s                        # a few of each kind
    JAXDIFF_ATTACKS=200 python -m pytest tests/attack -m slow -n 0 -s    # the number of crashes, others in proportion

Each attack strikes a run that earlier ones have struck; in the end it is left alone and compared, to the bit. Lost: the
newest checkpoint is older than before, or the run cannot be resumed. Wrong: it ends otherwise than the run that nothing
befell. Unclear: it ended by itself with something else than an exit code of the documented ones and a message.
"""

import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from training_runs import losses

from jaxdiff.training.distributed import RETRY
from jaxdiff.training.peers import REFUSED

pytestmark = pytest.mark.slow
CRASHES = int(os.environ.get("JAXDIFF_ATTACKS", "10"))
SEED = int(os.environ.get("JAXDIFF_ATTACK_SEED", "0"))
PER_RUN = 8  # attacks on one run before it is left alone
CHANGES = {"train.steps": 10, "train.save_every": 1, "checkpoint.keep": 2, "sample.count": 0, "eval.samples": 16}
CHANGES |= {"train.eval_every": 3, "train.sample_every": 0}
MESSAGES = ("cannot write", "could not write", "cannot be read", "saved step", "nothing new to save", "No such file")


class Server:
    """A process that forks runs (attack_server.py)."""

    def __init__(self):
        folders = [str(Path(__file__).parents[1] / "training"), str(Path(__file__).parents[2])]
        kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUMPY_DTYPE_PROMOTION")}
        environment = {
            **kept,
            "PYTHONPATH": os.pathsep.join(folders),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        environment["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
        command = [sys.executable, str(Path(__file__).with_name("attack_server.py"))]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=environment, **pipes)
        self.readers = {}

    def ask(self, order):
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def start(self, workdir, **order):
        """The process id and the log of a run."""
        log = Path(f"{workdir}.log{order.get('process', '')}")
        pipe = Path(f"{log}.pipe")  # not a file, which a limit on the size of files would hit too
        pipe.unlink(missing_ok=True)
        os.mkfifo(pipe)
        with open(log, "wb") as file:
            self.readers[log] = subprocess.Popen(["cat", str(pipe)], stdout=file)
        changes = {**CHANGES, **order.pop("changes", {})}
        return self.ask({"run": {"workdir": str(workdir), "log": str(pipe), "changes": changes, **order}}), log

    def run(self, workdir, **order):
        """The exit code and what the run said."""
        child, log = self.start(workdir, **order)
        return self.wait(child, log), log.read_text()

    def wait(self, child, log):
        """The exit code of a run, whose log is then complete."""
        code = self.ask({"wait": child})
        self.readers.pop(log).wait(60)
        return code

    def close(self):
        self.process.communicate()


@pytest.fixture(scope="module")
def server():
    made = Server()
    yield made
    made.close()


@pytest.fixture(scope="module")
def straight(server, tmp_path_factory):
    """A run that nothing befalls, and how often it touches its workdir."""
    workdir = tmp_path_factory.mktemp("attack") / "straight"
    code, said = server.run(workdir)
    assert code == 0, said
    return workdir, int(said.rpartition("OPERATIONS ")[2].split()[0])


def newest(workdir):
    """The step of the newest complete checkpoint; -1 if there is none."""
    folder = workdir / "checkpoints"
    return max((int(p.name) for p in folder.iterdir() if p.name.isdigit()), default=-1) if folder.is_dir() else -1


def same(workdir, straight):
    exports = [(folder / "export.safetensors").read_bytes() for folder in (workdir, straight)]
    return exports[0] == exports[1] and losses(workdir) == losses(straight)


def is_clear(kind, code, said):
    """A documented exit code, and a message unless the process had no time for one."""
    if code == 0:
        return True
    if kind == "kill":
        return code == -9
    if kind in ("term", "int") and code in (-15, -2, 1):  # before the run began: the system's own way to end
        return code != 1 or "KeyboardInterrupt" in said
    last = [line for line in said.splitlines() if any(text in line for text in MESSAGES)]
    return code in (RETRY, REFUSED) and bool(last)


def left_alone(server, workdir, reference, row, notes):
    """Let a run end by itself, and compare it."""
    code, said = server.run(workdir)
    if code:
        row["lost"] += 1
        notes.append(f"{workdir}: the rerun ended with {code}\n{said[-1500:]}")
    elif not same(workdir, reference):
        row["wrong"] += 1
        notes.append(f"{workdir} ends otherwise")
    shutil.rmtree(workdir, ignore_errors=True)


def attack(server, straight, tmp_path, kind, count, seed):
    """A table row: attacks that struck, exit codes, and what went wrong."""
    draw = random.Random(f"{kind} {seed}")
    reference, operations = straight
    row, codes, notes = Counter(attacks=0, runs=0, lost=0, wrong=0, unclear=0), Counter(), []
    while row["attacks"] < count:
        workdir = tmp_path / f"{kind}{row['runs']}"
        row["runs"] += 1
        for _ in range(min(PER_RUN, count - row["attacks"])):
            before = newest(workdir)
            if before == CHANGES["train.steps"]:
                break
            share = 1 - max(before, 0) / CHANGES["train.steps"]  # of what is still to be done
            at = draw.randrange(1, max(3, int(0.9 * share * operations)))
            code, said = server.run(workdir, fault=[kind, at])
            row["attacks"] += code != 0
            codes[code] += 1
            if kind != "deleted" and newest(workdir) < before:
                row["lost"] += 1
                notes.append(f"{kind} at {at}: step {before} -> {newest(workdir)}")
            if not is_clear(kind, code, said):
                row["unclear"] += 1
                notes.append(f"{kind} at {at}: code {code}\n{said[-1500:]}")
        left_alone(server, workdir, reference, row, notes)
    print(f"\n{kind:9s} {dict(row)} exit codes {dict(codes)}")
    return row, "\n".join(notes)


@pytest.mark.parametrize(
    ("kind", "share"), [("kill", 1.0), ("term", 0.2), ("int", 0.1), ("full", 0.15), ("readonly", 0.1), ("deleted", 0.1)]
)
def test_faults_at_file_operations(server, straight, tmp_path, kind, share):
    row, notes = attack(server, straight, tmp_path, kind, max(2, round(share * CRASHES)), SEED)
    assert row["lost"] == row["wrong"] == row["unclear"] == 0, notes


def test_kills_at_any_time(server, straight, tmp_path):
    """By the clock, wherever the run is: importing nothing, compiling, stepping, saving."""
    draw, count, notes = random.Random(SEED), max(2, CRASHES // 2), []
    begun = time.monotonic()
    assert server.run(tmp_path / "timed")[0] == 0
    whole, row = time.monotonic() - begun, Counter(attacks=0, runs=0, lost=0, wrong=0)
    while row["attacks"] < count:
        workdir = tmp_path / f"run{row['runs']}"
        row["runs"] += 1
        for _ in range(PER_RUN):
            before = newest(workdir)
            if before == CHANGES["train.steps"]:
                break
            child, log = server.start(workdir)
            time.sleep(draw.uniform(0.1, 0.8) * whole)
            os.kill(child, 9)  # a zombie, if it has ended: the server has not waited for it
            row["attacks"] += server.wait(child, log) == -9
            row["lost"] += newest(workdir) < before
        left_alone(server, workdir, straight[0], row, notes)
    print(f"\nkill -9 at any time: {dict(row)}")
    assert row["lost"] == row["wrong"] == 0, notes


def test_deaths_of_one_of_two(server, tmp_path):
    draw, count = random.Random(SEED), max(1, CRASHES // 10)
    sharded = {"mesh.data": 1, "mesh.fsdp": 2, "mesh.min_size": 64, "train.eval_every": 0}

    def pair(workdir):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        return [server.start(workdir, process=i, port=port, changes=sharded) for i in (0, 1)]

    def wait(children):
        return [server.wait(child, log) for child, log in children]

    begun = time.monotonic()
    reference = pair(tmp_path / "straight")
    assert wait(reference) == [0, 0], [log.read_text()[-2000:] for _, log in reference]
    whole, codes, lost = time.monotonic() - begun, Counter(), 0
    for _ in range(count):
        before = newest(tmp_path / "run")
        children = pair(tmp_path / "run")
        time.sleep(draw.uniform(0, whole))
        victim = draw.randrange(2)
        os.kill(children[victim][0], 9)
        ended = wait(children)
        codes[f"killed {victim}: {ended[1 - victim]}"] += 1
        lost += newest(tmp_path / "run") < before
    children = pair(tmp_path / "run")
    ended = wait(children)
    print(f"\n{count} deaths of one of two, the other ended with {dict(codes)}; lost {lost}")
    assert ended == [0, 0] and lost == 0, [log.read_text()[-2000:] for _, log in children]
    assert same(tmp_path / "run", tmp_path / "straight")
