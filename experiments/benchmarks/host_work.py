"""What a training process does on its host in a step, by how many processes there are: the share of each stays flat.

    python -m experiments.benchmarks.host_work [--steps 1000] [--out host_work.json]

Real processes on this machine, 1, 2 and 4 of them, each with 64 images per step of a set of CIFAR-10's size (the global
batch grows with them): its share of the data, the question whether to stop, log lines and checkpoints as often as
configs/default.py has them, the state being small. No training step is run: a device would do that. Counted are CPU
seconds and not time, because four processes share the cores of one machine: of the main thread in each part, and of the
whole process, which also has the threads that write checkpoints and talk to the others. Target: the whole at 4
processes at most 1.25 times that of one alone.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

COUNTS = (1, 2, 4)
BATCH = 64  # of each process
PARTS = ("data", "stop", "log", "save")


def work(processes: int, process: int, port: int, steps: int, workdir: Path) -> dict[str, float]:
    """Milliseconds of CPU per step in each part and in the whole of one process."""
    from jaxdiff.training import distributed

    distributed.connect(f"127.0.0.1:{port}", processes, process)
    import jax

    from jaxdiff import data
    from jaxdiff.configs import default
    from jaxdiff.training.checkpoint import Checkpoints
    from jaxdiff.training.logs import Logger
    from jaxdiff.training.stop import Stop

    every = default.get_config().train
    dataset = data.load("arrays", images=np.zeros((50_000, 32, 32, 3), np.uint8))
    log = Logger(workdir, quiet=True)
    sharding = jax.sharding.NamedSharding(jax.make_mesh((processes,), ("data",)), jax.sharding.PartitionSpec("data"))
    state = {"w": jax.make_array_from_process_local_data(sharding, np.zeros(1, np.float32))}
    checkpoints, spent = Checkpoints(workdir / "checkpoints"), dict.fromkeys(PARTS, 0.0)

    def timed(part: str, action: Callable[[], Any]) -> None:
        begun = time.thread_time()
        action()
        spent[part] += time.thread_time() - begun

    def take(step: int) -> None:
        timed("data", lambda: dataset.batch(step, BATCH * processes, process, processes))
        timed("stop", lambda: stop.requested(step))
        if step % every.log_every == 0:
            timed("log", lambda: log.scalars(step, {"loss": 1.0, "grad_norm": 2.0, "steps_per_second": 3.0}))
        if step % every.save_every == 0:
            timed("save", lambda: checkpoints.save(step, state))

    with Stop() as stop:
        for step in range(1, every.save_every + 1):  # orders are drawn, files opened, modules loaded
            take(step)
        checkpoints.wait()
        spent.update(dict.fromkeys(PARTS, 0.0))
        begun = time.process_time()
        for step in range(1, steps + 1):
            take(every.save_every + step)
        checkpoints.wait()
        whole = time.process_time() - begun
    checkpoints.close()
    return {part: 1e3 * seconds / steps for part, seconds in {**spent, "whole": whole}.items()}


def measure(processes: int, steps: int) -> dict[str, float]:
    """The mean over the processes of a run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        common = [sys.executable, "-m", "experiments.benchmarks.host_work", "--steps", str(steps), "--child"]
        commands = [[*common, str(processes), str(i), str(port), folder] for i in range(processes)]
        children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
        found = [json.loads(child.communicate()[0].splitlines()[-1]) for child in children]
    return {part: float(np.mean([one[part] for one in found])) for part in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--out", default="")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        processes, process, port = map(int, options.child[:3])
        print(json.dumps(work(processes, process, port, options.steps, Path(options.child[3]))))
        return
    table = {count: measure(count, options.steps) for count in COUNTS}
    print(f"processes | {' | '.join(table[1])} (CPU ms per step) | whole over one process")
    for count, row in table.items():
        columns = " | ".join(f"{value:.3f}" for value in row.values())
        print(f"{count} | {columns} | {row['whole'] / table[1]['whole']:.2f}")
    if options.out:
        Path(options.out).write_text(json.dumps({"milliseconds_per_step": table, "target": 1.25}, indent=2) + "\n")


if __name__ == "__main__":
    main()
