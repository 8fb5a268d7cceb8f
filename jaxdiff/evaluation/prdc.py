"""Precision, recall, density and coverage: how two point clouds cover each other's k-nearest-neighbour balls.

Each real (fake) point gets the ball whose radius is the distance to its k-th nearest neighbour among the real (fake)
points, itself not counted; a point is inside when strictly nearer than the radius.

    precision   share of fake points inside some real ball          Kynkäänniemi et al. 2019
    recall      share of real points inside some fake ball
    density     real balls a fake point is inside of, over k        Naeem et al. 2020
    coverage    share of real balls with some fake point inside
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike

from jaxdiff.evaluation.frechet import check_features


def prdc(real: ArrayLike, fake: ArrayLike, k: int = 5, chunk: int = 1024) -> dict[str, float]:
    """Precision, recall, density and coverage of fake [m, d] against real [n, d], in float64.

    Distances are computed `chunk` rows at a time, so memory grows as chunk * max(n, m), not as n * m.
    """
    x, y = check_features(real, "real"), check_features(fake, "fake")
    _check(x, y, k, chunk)
    centre = x.mean(0)  # distances from dot products lose digits to a large common offset
    x, y = x - centre, y - centre
    real_radii, fake_radii = _radii(x, k, chunk), _radii(y, k, chunk)
    balls = np.zeros(len(y), np.int64)
    recalled = covered = 0
    for start, distances in _chunks(x, y, chunk):
        radii = real_radii[start : start + len(distances), None]
        balls += (distances < radii).sum(0)
        recalled += int((distances < fake_radii).any(1).sum())
        covered += int((distances.min(1) < radii[:, 0]).sum())
    return {
        "precision": float((balls > 0).mean()),
        "recall": recalled / len(x),
        "density": float(balls.mean() / k),
        "coverage": covered / len(x),
    }


def _check(real: np.ndarray, fake: np.ndarray, k: int, chunk: int) -> None:
    if real.shape[1] != fake.shape[1]:
        raise ValueError(f"real features are {real.shape[1]} wide, fake ones {fake.shape[1]}; use one feature network")
    if k < 1 or chunk < 1:
        raise ValueError(f"k and chunk must be at least 1, got k={k}, chunk={chunk}")
    for name, points in (("real", real), ("fake", fake)):
        if len(points) <= k:
            raise ValueError(f"k={k} needs more than {k} {name} points, got {len(points)}; lower k or add some")


def _radii(points: np.ndarray, k: int, chunk: int) -> np.ndarray:
    """The squared distance of each point to its k-th nearest neighbour, itself not counted."""
    radii = np.empty(len(points))
    for start, distances in _chunks(points, points, chunk):
        rows = np.arange(len(distances))
        distances[rows, start + rows] = np.inf
        radii[start : start + len(distances)] = np.partition(distances, k - 1, axis=1)[:, k - 1]
    return radii


def _chunks(a: np.ndarray, b: np.ndarray, chunk: int) -> Iterator[tuple[int, np.ndarray]]:
    """(first row, squared distances [rows, len(b)]) for `chunk` rows of a at a time."""
    squares = np.square(b).sum(1)
    for start in range(0, len(a), chunk):
        rows = a[start : start + chunk]
        distances = rows @ b.T
        distances *= -2
        distances += np.square(rows).sum(1)[:, None]
        distances += squares
        yield start, np.maximum(distances, 0, out=distances)
