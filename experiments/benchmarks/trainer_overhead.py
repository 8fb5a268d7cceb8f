"""What the training loop costs beyond the step it runs: its time per step over that of the bare compiled step.

    python -m experiments.benchmarks.trainer_overhead [--steps 1000] [--out trainer_overhead.json]

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
from jaxdiff.training import prepare, trainer
from jaxdiff.training.logs import Logger
from jaxdiff.training.sharding import global_batch
from jaxdiff.training.state import Guard, declare, example_batch, shardings_of

BATCHES = 16  # kept ready for the bare loop


class Bare:
    """The step in a plain loop: `window()` takes as many steps as a log window has."""

    def __init__(self, config: Any, program: Any) -> None:
        (run, mesh), size = prepare(config), config.data.batch_size
        init = jax.jit(run.method.init, out_shardings=shardings_of(declare(run, mesh)))
        self.carry = init(jax.random.key(0), example_batch(run, mesh)), Guard(jnp.int32(0), jnp.int32(-1))
        self.ready = cycle([global_batch(run.select(run.data.batch(i, size)), mesh) for i in range(BATCHES)])
        self.program, self.base = program, jax.random.key(1)
        self.steps = [jnp.int32(i) for i in range(config.train.log_every)]

    def window(self) -> None:
        state, guard = self.carry
        for step, batch in zip(self.steps, islice(self.ready, len(self.steps)), strict=True):
            state, guard, _ = self.program(state, guard, batch, self.base, step)
        self.carry = jax.block_until_ready((state, guard))


class Alternating(Logger):
    """The trainer's logger, which runs the bare loop after each line and keeps the time of both."""

    bare: Bare
    windows: list[tuple[np.ndarray, np.ndarray]]  # (wall, CPU) seconds of the trainer's and of the bare steps
    begun: np.ndarray | None = None

    def scalars(self, step: int, values: dict[str, float], show: bool = True) -> None:
        super().scalars(step, values, show)
        ended = clocks()
        self.bare.window()
        if self.begun is not None:  # the first window also waited for the first batch
            self.windows.append((ended - self.begun, clocks() - ended))
        self.begun = clocks()


def clocks() -> np.ndarray:
    return np.array([time.perf_counter(), time.process_time()])


def measure(config: Any) -> np.ndarray:
    """Seconds [window, (trainer, bare), (wall, CPU)] of a run."""
    compile_step = trainer.compile_step

    def share(*arguments: Any) -> Any:
        program = compile_step(*arguments)
        Alternating.bare, Alternating.windows = Bare(config, program), []
        return program

    trainer.Logger, trainer.compile_step = Alternating, share  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as folder:
        trainer.train(config, folder)
    return np.asarray(Alternating.windows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    config = digits.get_config()
    config.train.steps = config.train.save_every = options.steps
    config.sample.count = 0
    seconds = measure(config)
    wall, cpu = seconds[..., 0], seconds[..., 1]
    milliseconds = 1e3 * np.median(wall, 0) / config.train.log_every
    low, ratio, high = np.percentile(wall[:, 0] / wall[:, 1], [25, 50, 75])
    in_cpu = cpu[:, 0].sum() / cpu[:, 1].sum()
    print(
        f"trainer {milliseconds[0]:.2f} ms per step, bare step {milliseconds[1]:.2f} ms\n"
        f"trainer / bare: {ratio:.3f} (median of {len(wall)} pairs of windows; quartiles {low:.3f}, {high:.3f}), "
        f"in CPU time {in_cpu:.3f}; target <= 1.05"
    )
    if options.out:
        named = dict(zip(("trainer", "bare"), milliseconds.tolist(), strict=True))
        result = {"milliseconds_per_step": named, "ratio": ratio, "quartiles": [low, high], "cpu_ratio": in_cpu}
        Path(options.out).write_text(json.dumps({**result, "windows": len(wall), "target": 1.05}, indent=2) + "\n")


if __name__ == "__main__":
    main()
