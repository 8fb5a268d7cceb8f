"""Kernel inception distance (Binkowski et al. 2018): the squared maximum mean discrepancy with a cubic kernel.

    k(x, y) = (x.y / d + 1)^3
    MMD^2   = mean_{i != j} k(x_i, x_j) + mean_{i != j} k(y_i, y_j) - 2 mean_{i, j} k(x_i, y_j)

Without the terms i = j the estimate is unbiased at any number of samples, and may be negative. The published value is
the mean over random subsets.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from jaxdiff.evaluation.frechet import check_features


def kid(a: ArrayLike, b: ArrayLike, subsets: int = 100, size: int = 1000, seed: int = 0) -> tuple[float, float]:
    """Mean and standard deviation over subsets of `size` rows of each set; smaller sets are used whole."""
    a, b = check_features(a, "a"), check_features(b, "b")
    if a.shape[1] != b.shape[1]:
        raise ValueError(
            f"features of width {a.shape[1]} and {b.shape[1]} cannot be compared; use one feature network for both"
        )
    if subsets < 1 or size < 2 or min(len(a), len(b)) < 2:
        raise ValueError(f"KID needs at least 2 samples of each, got {len(a)}, {len(b)}, {subsets=}, {size=}")
    if max(len(a), len(b)) <= size:
        return mmd2(a, b), 0.0
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(subsets):
        x, y = (s[rng.choice(len(s), min(size, len(s)), replace=False)] for s in (a, b))
        found.append(mmd2(x, y))
    return float(np.mean(found)), float(np.std(found))


def mmd2(x: np.ndarray, y: np.ndarray) -> float:
    """The unbiased estimate for float64 features [n, d] and [m, d]."""
    n, m, d = len(x), len(y), x.shape[1]
    xx, yy, xy = ((p @ q.T / d + 1) ** 3 for p, q in ((x, x), (y, y), (x, y)))
    within = (xx.sum() - np.trace(xx)) / (n * (n - 1)) + (yy.sum() - np.trace(yy)) / (m * (m - 1))
    return float(within - 2 * xy.mean())
