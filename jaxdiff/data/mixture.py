"""Points drawn from Gaussian mixtures, whose exact denoiser is `denoisers.gaussian_mixture(means, std)`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from jaxdiff.data.examples import Source
from jaxdiff.data.memory import in_memory
from jaxdiff.errors import pick


def _grid(dim: int) -> np.ndarray:
    """5 per axis on [-1, 1]."""
    return np.asarray(list(itertools.product(np.linspace(-1, 1, 5), repeat=dim)))


def _ring(dim: int) -> np.ndarray:
    """8 on the unit circle of the first two axes."""
    angles = 2 * math.pi * np.arange(8) / 8
    return np.stack([np.cos(angles), np.sin(angles), *np.zeros((dim - 2, 8))], axis=-1)


def _pair(dim: int) -> np.ndarray:
    """Two, at -1 and 1 on the first axis."""
    return np.stack([[-1, 1], *np.zeros((dim - 1, 2))], axis=-1)


# name -> (means of a dimension, lowest and highest dimension; a grid has 5**dim modes)
MIXTURES: dict[str, tuple[Callable[[int], np.ndarray], int, int]] = {
    "grid": (_grid, 1, 5),
    "ring": (_ring, 2, 4096),
    "pair": (_pair, 1, 4096),
}


def mixture_means(preset: str = "grid", dim: int = 2) -> np.ndarray:
    """The means [k d] of a preset: with its std the arguments of `denoisers.gaussian_mixture`."""
    place, low, high = pick(MIXTURES, preset, "mixture preset")
    if not low <= dim <= high:
        raise ValueError(
            f"mixture preset {preset!r} exists in {low} to {high} dimensions, got dim={dim}; give means= for others"
        )
    return place(dim)


def mixture_components(
    preset: str = "grid",
    *,
    dim: int = 2,
    std: float | Sequence[float] = 0.05,
    means: ArrayLike | None = None,
    weights: ArrayLike | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Means [k d], stds [k] and weights [k] of a `mixture` source: what `denoisers.gaussian_mixture` takes."""
    means = mixture_means(preset, dim) if means is None else np.asarray(means, np.float64)
    if means.ndim != 2:
        raise ValueError(f"a mixture needs means of shape [k d], got {means.shape}")
    k = len(means)
    weights = np.full(k, 1 / k) if weights is None else np.asarray(weights, np.float64) / np.sum(weights)
    stds = np.full(k, std) if np.ndim(std) == 0 else np.asarray(std, np.float64)
    if weights.shape != (k,) or stds.shape != (k,) or (weights < 0).any() or (stds < 0).any():
        raise ValueError(
            f"a mixture of {k} components needs {k} weights and stds (or one std), none negative; "
            f"got shapes {weights.shape} and {stds.shape}"
        )
    return means, stds, weights


def mixture(
    preset: str = "grid",
    *,
    dim: int = 2,
    std: float | Sequence[float] = 0.05,
    means: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    count: int = 50_000,
    draw: int = 0,
) -> Source:
    """`count` points of a Gaussian mixture, `image` of shape [d] and `label` the component; not bounded by [-1, 1].

    `means` [k d] replaces the preset; `std` is one value or one per component; `draw` is the seed.
    """
    name = f"mixture/{preset}" if means is None else "mixture/custom"
    if count < 1:
        raise ValueError(f"a mixture needs count >= 1, got {count}")
    means, stds, weights = mixture_components(preset, dim=dim, std=std, means=means, weights=weights)
    rng = np.random.RandomState(draw)
    labels = np.searchsorted(np.cumsum(weights)[:-1], rng.uniform(size=count), side="right")
    points = means[labels] + stds[labels, None] * rng.normal(size=(count, means.shape[1]))
    return in_memory(name, points.astype(np.float32), labels, num_classes=len(means))
