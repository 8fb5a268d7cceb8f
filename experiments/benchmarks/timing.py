"""Timed calls that take turns, and how a ratio over many rounds is written."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np


def seconds(action: Callable[[], Any]) -> float:
    """Wall-clock seconds until the arrays that `action` returns are there."""
    begun = time.perf_counter()
    jax.block_until_ready(action())
    return time.perf_counter() - begun


def cpu_seconds(action: Callable[[], Any]) -> float:
    """CPU seconds of all threads until the arrays that `action` returns are there."""
    begun = time.process_time()
    jax.block_until_ready(action())
    return time.process_time() - begun


def turns(actions: Mapping[str, Callable[[], Any]], rounds: int, window: float = 0.0) -> dict[str, list[float]]:
    """CPU seconds of a call of each action, in turns over the rounds after two that warm up.

    An action is called as often in a round as takes it `window` seconds.
    """
    for action in actions.values():
        cpu_seconds(action)
    counts = {name: 1 + int(window / max(cpu_seconds(action), 1e-6)) for name, action in actions.items()}
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            times[name].append(sum(cpu_seconds(action) for _ in range(counts[name])) / counts[name])
    return times


def quartiles(ratios: Sequence[float]) -> list[float]:
    """Lower quartile, median, upper quartile."""
    return [float(value) for value in np.percentile(ratios, [25, 50, 75])]


def spread_of(values: Sequence[float], digits: int = 2) -> str:
    low, middle, high = values
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def spread(ratios: Sequence[float], digits: int = 3) -> str:
    """median (lower quartile-upper quartile)."""
    return spread_of(quartiles(ratios), digits)
