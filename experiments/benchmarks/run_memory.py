"""Memory and open files of a long run, and of sampling again and again: both should stay where they are.

    python -m experiments.benchmarks.run_memory [--steps=20000] [--samples=50]

Trains a small network on points, with a checkpoint every 100 steps and evaluations and samples every 1,000, then loads
the run and samples it. Prints MiB in memory (resident, after freed pages were returned to the system), MiB in use by
malloc, and the number of open files.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import jax

import jaxdiff
from jaxdiff.configs import mixture2d
from jaxdiff.training import train

C = ctypes.CDLL(None)


class Mallinfo(ctypes.Structure):
    """mallinfo2 of glibc."""

    NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in NAMES.split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--samples", type=int, default=50)
    args = parser.parse_args()
    C.mallinfo2.restype = Mallinfo
    print(f"{'':24s} {'resident':>9s} {'malloc':>9s} {'files':>6s}")
    with tempfile.TemporaryDirectory() as folder:
        workdir = Path(folder) / "run"
        trained(workdir, args.steps)
        sampled(workdir, args.samples)


def trained(workdir: Path, steps: int) -> None:
    """Train, and measure ten times."""
    config = mixture2d.get_config("tiny")
    with config.unlocked():
        config.train.steps = steps
        config.train.save_every, config.train.log_every = 100, max(1, steps // 10)
        config.train.eval_every = config.train.sample_every = 1000

    def measure(step: int, values: Mapping[str, float]) -> None:
        if "loss" in values:
            show(f"step {step:,}")

    train(config, workdir, quiet=True, on_metrics=measure)
    show("after training")


def sampled(workdir: Path, count: int) -> None:
    """Sample one run repeatedly, and measure five times."""
    saved = jaxdiff.load(workdir)
    for i in range(1, count + 1):
        jax.block_until_ready(saved.sample(i, 256))
        if i in (1, 5) or i % max(1, count // 5) == 0:
            show(f"sampled {i} times")


def show(label: str) -> None:
    """Print a line."""
    gc.collect()
    C.malloc_trim(0)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    files = len(os.listdir("/proc/self/fd"))
    print(f"{label:24s} {resident / 2**20:9.1f} {C.mallinfo2().uordblks / 2**20:9.1f} {files:6d}", flush=True)


if __name__ == "__main__":
    main()
