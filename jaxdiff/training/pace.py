"""Metrics, speed and time left since the last log line; achieved FLOP/s and MFU, memory, and time waited for data.

    tflops_per_device = FLOPs of a step / devices / seconds per step / 1e12
    mfu               = the same over the chip's published peak in bfloat16 (jaxdiff/chips.py)

FLOPs are counted as `jaxdiff plan` counts them: products and convolutions of the traced step, recomputation left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import jax
import numpy as np
from jax import Array

from jaxdiff import chips
from jaxdiff.training.logs import Logger

Item = TypeVar("Item")


class Pace:
    """Counts from `first` on; `line` is what a log line has."""

    def __init__(
        self, first: int, steps: int, log: Logger, devices: int, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.steps, self.log, self.devices, self.now = steps, log, devices, now
        self.peak = chips.peak_of(jax.devices()[0].device_kind)
        self.restart(first)

    def restart(self, step: int) -> None:
        self.pending: list[dict[str, Array]] = []
        self.mark, self.clock, self.waited = step, self.now(), 0.0

    def waiting(self, batches: Iterable[Item]) -> Iterator[Item]:
        """The batches, with the time it takes to get each added to the wait."""
        iterator = iter(batches)
        while True:
            begun = self.now()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self.waited += self.now() - begun
            yield batch

    def add(self, values: dict[str, Array]) -> None:
        self.pending.append(values)

    def line(self, step: int) -> dict[str, float]:
        """Mean metrics, steps per second, minutes left and what the hardware did; resets the count."""
        values = mean(self.pending)  # waits for the last step
        seconds = max(self.now() - self.clock, 1e-9)
        rate = (step - self.mark) / seconds
        values |= {"steps_per_second": rate, "minutes_left": (self.steps - step) / rate / 60}
        values["data_wait"] = self.waited / seconds
        if self.log.flops:
            achieved = self.log.flops / self.devices * rate
            values["tflops_per_device"] = achieved / 1e12
            if self.peak:
                values["mfu"] = achieved / self.peak
        memory = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        if memory is not None:
            values["memory_gib"] = memory / 2**30
        self.restart(step)
        return values


def mean(pending: list[dict[str, Array]]) -> dict[str, float]:
    """Means of the finite values since the last log line."""
    fetched = jax.device_get(pending)
    columns = {name: np.array([float(values[name]) for values in fetched]) for name in fetched[0]}
    finite = {name: column[np.isfinite(column)] for name, column in columns.items()}
    return {name: float(column.mean()) for name, column in finite.items() if len(column)}
