"""Training in memory, for studies that compare many short trainings: timed, looked at on the way, nothing written.

`training.train` is the loop of runs; here a run is trained from seeds and teachers that are given as arrays, its
programs are compiled once for all seeds, and seconds leave out compilation and whatever happens at the marks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxdiff.methods import TrainState
from jaxdiff.training import Run

Watch = Callable[[int, TrainState, Any], None]  # (step, state, metrics)


def use_compile_cache(folder: str = "~/.cache/jaxdiff") -> None:
    """Keep compiled programs between runs, unless a cache is set already."""
    if not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", str(Path(folder).expanduser()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def marks_of(steps: int, count: int) -> list[int]:
    """`count` steps, evenly spaced, the last one `steps`."""
    return [steps * (i + 1) // count for i in range(count)]


class Loop:
    """The compiled programs of a run: `init(seed, frozen)`, and `train(state, batches, keys)`, timed by `clock`."""

    def __init__(self, run: Run, clock: Callable[[], float] = time.monotonic) -> None:
        self.run, self.clock = run, clock
        # an initialiser runs once per seed: on CPU, spare it the compiler's optimizations
        options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
        self._init = jax.jit(run.method.init, compiler_options=options)
        self._step: Any = None

    @property
    def example(self) -> dict[str, Any]:
        """A batch of zeros, all that a distillation without data needs."""
        return self.run.example(self.run.config.data.batch_size)

    def init(self, seed: int, frozen: Any = None) -> TrainState:
        """The state before training."""
        return self._init(jax.random.key(seed), self.example, frozen or {})

    def train(
        self,
        state: TrainState,
        batches: Iterable[Any],
        keys: Iterable[jax.Array],
        *,
        marks: Sequence[int] = (),
        watch: Watch | None = None,
    ) -> tuple[TrainState, float]:
        """One step per key: the state, and the seconds; `watch(step, state, metrics)` at the marks is not counted."""
        if self._step is None:
            step = jax.jit(self.run.method.step, donate_argnums=0)
            self._step = step.lower(state, self.example, jax.random.key(0)).compile()
        begun, aside = self.clock(), 0.0
        for done, (key, batch) in enumerate(zip(keys, batches, strict=False), 1):
            state, metrics = self._step(state, batch, key)
            if watch is not None and done in marks:
                jax.block_until_ready(state)
                paused = self.clock()
                watch(done, state, metrics)
                aside += self.clock() - paused
        jax.block_until_ready(state)
        return state, self.clock() - begun - aside
