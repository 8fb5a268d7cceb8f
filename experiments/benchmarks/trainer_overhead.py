"""What the training loop costs beyond the step it runs: its time per step over that of the bare compiled step.

    python experiments/benchmarks/trainer_overhead.py [--steps 1000] [--out trainer_overhead.json]

At the quickstart's size (configs/digits.py, batch 64), in one process and with one compiled program: after every log
window of a real run (batches prepared in the background, checks, log lines, metrics.jsonl, TensorBoard) a plain Python
loop takes as many steps over batches that already lie on the device. Neighbouring windows are compared, so that a busy
machine disturbs both alike. Checkpoints, grids and evaluations have cadences of their own and are left out.
Target: a ratio of at most 1.05.
"""

import argparse
import json
import tempfile
import time
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdiff.configs import digits
from jaxdiff.training import trainer
from jaxdiff.training.logs import Logger
from jaxdiff.training.sharding import global_batch

BATCHES = 16  # kept ready for the bare loop


class Bare:
    """The step in a plain loop: `window()` takes as many steps as a log window has."""

    def __init__(self, job: trainer.Job, program: Any) -> None:
        c = job.config
        init = jax.jit(job.method.init, out_shardings=trainer.declare(job)[1])
        self.carry = init(jax.random.key(0), trainer.example_batch(job)), trainer.Guard(jnp.int32(0), jnp.int32(-1))
        self.ready = cycle([global_batch(job.dataset.batch(i, c.data.batch_size), job.mesh) for i in range(BATCHES)])
        self.program, self.base = program, jax.random.key(1)
        self.steps = [jnp.int32(i) for i in range(c.train.log_every)]

    def window(self) -> None:
        state, guard = self.carry
        for step, batch in zip(self.steps, islice(self.ready, len(self.steps)), strict=True):
            state, guard, _ = self.program(state, guard, batch, self.base, step)
        self.carry = jax.block_until_ready((state, guard))


class Alternating(Logger):
    """The trainer's logger, which after each line lets the bare loop have its turn and keeps the time of both."""

    bare: Bare
    wall: list[tuple[float, float]]
    cpu: list[tuple[float, float]]
    begun: tuple[float, float] | None = None

    def scalars(self, step: int, values: dict[str, float], show: bool = True) -> None:
        super().scalars(step, values, show)
        cls, ended = type(self), clocks()
        cls.bare.window()
        after = clocks()
        if cls.begun is not None:  # the first window also waited for the first batch
            trainers, bares = np.subtract(ended, cls.begun), np.subtract(after, ended)
            cls.wall.append((float(trainers[0]), float(bares[0])))
            cls.cpu.append((float(trainers[1]), float(bares[1])))
        cls.begun = clocks()


def clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def compile_and_share(run: Any, arguments: Any, stop: Any, log: Any) -> Any:
    program = compile_step(run, arguments, stop, log)
    Alternating.bare = Bare(trainer.build(CONFIG), program)
    return program


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    CONFIG.train.steps, CONFIG.train.save_every, CONFIG.sample.count = options.steps, options.steps, 0
    Alternating.wall, Alternating.cpu = [], []
    trainer.Logger, trainer.compile_step = Alternating, compile_and_share  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as folder:
        trainer.train(CONFIG, folder)
    wall, cpu = np.asarray(Alternating.wall), np.asarray(Alternating.cpu)
    milliseconds = 1e3 * np.median(wall, 0) / CONFIG.train.log_every
    result = {
        "milliseconds_per_step": {"trainer": milliseconds[0], "bare": milliseconds[1]},
        "ratio": float(np.median(wall[:, 0] / wall[:, 1])),
        "ratio_quartiles": np.percentile(wall[:, 0] / wall[:, 1], [25, 75]).tolist(),
        "cpu_ratio": float(cpu[:, 0].sum() / cpu[:, 1].sum()),
        "windows": len(wall),
        "target": 1.05,
    }
    print(
        f"trainer {milliseconds[0]:.2f} ms per step, bare step {milliseconds[1]:.2f} ms\n"
        f"trainer / bare: {result['ratio']:.3f} (median of {len(wall)} pairs of windows; quartiles "
        f"{result['ratio_quartiles'][0]:.3f}, {result['ratio_quartiles'][1]:.3f}), "
        f"in CPU time {result['cpu_ratio']:.3f}; target <= 1.05"
    )
    if options.out:
        Path(options.out).write_text(json.dumps(result, indent=2) + "\n")


CONFIG = digits.get_config().unlock()
compile_step = trainer.compile_step

if __name__ == "__main__":
    main()
