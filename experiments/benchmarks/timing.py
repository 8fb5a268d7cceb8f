"""One timed call, and how a ratio over many rounds is written."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np


def seconds(action: Callable[[], Any]) -> float:
    """Wall-clock seconds until the arrays that `action` returns are there."""
    begun = time.perf_counter()
    jax.block_until_ready(action())
    return time.perf_counter() - begun


def spread(ratios: Sequence[float], digits: int = 3) -> str:
    """median (lower quartile-upper quartile)."""
    low, middle, high = np.percentile(ratios, [25, 50, 75])
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"
