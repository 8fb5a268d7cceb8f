"""Statistics of activations: noise, granularity, locality, redundancy. All in float64 on the host.

Features are [n e h w c]: n images, e noise draws of each at one noise level, on the activation's own grid.

    noise-to-signal  N / (mean Var_n(E_e f) - N / e), N = mean Var_e(f), variances per position and channel; the mean
                     of e draws keeps N / e of the noise, which is not signal
    noise leak       held-out R^2 of a linear map, shared by all positions, from f to the injected noise averaged onto
                     f's grid; 0 if f carries none of it
    granularity      mean radial frequency of the three leading principal maps of E_e f, weighted by power, in cycles
                     per image
    locality         P(p is more similar to an adjacent pixel of another part than to a distant one of its own);
                     0 semantic, 1 positional
    redundancy       linear CKA of two activations over the same positions (Kornblith et al. 2019)

They describe and filter activations; none of them measures quality.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Integer, Shaped
from numpy.typing import ArrayLike

from jaxdiff.trees import AnyArray


def noise_to_signal(f: Shaped[AnyArray, "n e h w c"]) -> float:
    """Variance over noise draws over variance over images (0: inf); compare within one kind of activation."""
    f = np.asarray(f, np.float64)
    if min(f.shape[:2]) < 2:
        raise ValueError(f"noise-to-signal needs 2 images and 2 draws or more, got {f.shape[0]} and {f.shape[1]}")
    noise = f.var(1, ddof=1).mean()
    signal = f.mean(1).var(0, ddof=1).mean() - noise / f.shape[1]
    return float(noise / signal) if signal > 0 else float("inf")


def noise_leak(f: Shaped[AnyArray, "n e h w c"], eps: Shaped[AnyArray, "n e H W d"], ridge: float = 1e-3) -> float:
    """How much injected noise is linearly decodable, fitted on the first half of the images, scored on the second."""
    f, eps = np.asarray(f, np.float64), np.asarray(eps, np.float64)
    n, e, height, width = f.shape[:4]
    if n < 2 or eps.shape[:2] != (n, e) or eps.shape[2] % height or eps.shape[3] % width:
        raise ValueError(
            f"noise leak needs 2 images or more and the noise of the same images and draws on a multiple of the grid, "
            f"got features {f.shape} and noise {eps.shape}"
        )
    rows, columns = eps.shape[2] // height, eps.shape[3] // width
    target = eps.reshape(n, e, height, rows, width, columns, -1).mean((3, 5))
    split = lambda a: (a[: n // 2].reshape(-1, a.shape[-1]), a[n // 2 :].reshape(-1, a.shape[-1]))  # noqa: E731
    (x, x_test), (y, y_test) = split(f), split(target)
    predicted = fit_ridge(x, y, ridge)(x_test)
    return float(1 - np.square(y_test - predicted).sum() / np.square(y_test - y.mean(0)).sum())


def fit_ridge(
    x: Float[np.ndarray, "m c"], y: Float[np.ndarray, "m d"], ridge: float
) -> Callable[[ArrayLike], np.ndarray]:
    """The ridge regression x -> y over standardised channels, as a function; `ridge` is relative to the samples."""
    mean, scale = x.mean(0), x.std(0)
    scale = np.where(scale > 1e-6 * scale.max(initial=0), scale, np.inf)  # constant channels are ignored
    z = (x - mean) / scale
    offset = y.mean(0)
    if len(z) < z.shape[1]:  # the same solution from the smaller system
        weights = z.T @ np.linalg.solve(z @ z.T + ridge * len(z) * np.eye(len(z)), y - offset)
    else:
        weights = np.linalg.solve(z.T @ z + ridge * len(z) * np.eye(z.shape[1]), z.T @ (y - offset))
    return lambda new: (np.asarray(new, np.float64) - mean) / scale @ weights + offset


def fit_pca(features: AnyArray, components: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean [c] and the leading principal directions [c k] of features [..., c], fitted once for all images."""
    rows = np.asarray(features, np.float64).reshape(-1, np.shape(features)[-1])
    if not 1 <= components <= rows.shape[1]:
        raise ValueError(f"{rows.shape[1]} channels have 1 to {rows.shape[1]} components, got {components}")
    mean = rows.mean(0)
    _, vectors = np.linalg.eigh((rows - mean).T @ (rows - mean))
    vectors = vectors[:, ::-1][:, :components]
    signs = np.sign(vectors[np.abs(vectors).argmax(0), np.arange(components)])  # fixes the arbitrary sign
    return mean.astype(np.float32), (vectors * signs).astype(np.float32)


def granularity(f: Shaped[AnyArray, "n e h w c"], components: int = 3) -> float:
    """Cycles per image; compare within one resolution. Grids below 8 x 8 have too few frequencies."""
    means = np.asarray(f, np.float64).mean(1)
    height, width, c = means.shape[1:]
    mean, directions = fit_pca(means, min(components, c))
    maps = (means - mean) @ directions
    power = np.square(np.abs(np.fft.fft2(maps - maps.mean((1, 2), keepdims=True), axes=(1, 2)))).sum((0, 3))
    rows, columns = np.fft.fftfreq(height) * height, np.fft.fftfreq(width) * width
    radius = np.hypot(rows[:, None], columns[None])
    return float((power * radius).sum() / power.sum()) if power.sum() else 0.0


def locality(
    f: Shaped[AnyArray, "n h w c"], parts: Integer[AnyArray, "n h w"], far: float = 0.25, ignore: int = 255
) -> float:
    """Over all pixels p, adjacent pixels of another part, pixels of p's part at least far * max(h, w) away.

    Similarity is the cosine of features minus their mean over all images; ties count half. `parts` lie on f's grid.
    """
    f, parts = np.asarray(f, np.float64), np.asarray(parts)
    f = f - f.mean((0, 1, 2))
    f = f / np.maximum(np.linalg.norm(f, axis=-1, keepdims=True), 1e-12)
    height, width = parts.shape[1:]
    place = np.stack(np.meshgrid(np.arange(height), np.arange(width), indexing="ij"), -1).reshape(-1, 2)
    distance = np.linalg.norm(place[:, None] - place[None], axis=-1)
    near, distant = (distance > 0) & (distance < 1.5), distance >= far * max(height, width)
    won, total = 0.0, 0
    for features, labels in zip(f.reshape(len(f), -1, f.shape[-1]), parts.reshape(len(f), -1), strict=True):
        similar = features @ features.T
        valid = (labels != ignore)[:, None] & (labels != ignore)[None]
        same = labels[:, None] == labels[None]
        for p in np.flatnonzero((near & valid & ~same).any(1) & (distant & valid & same).any(1)):
            beside, away = similar[p][(near & valid & ~same)[p]], similar[p][(distant & valid & same)[p]]
            gap = beside[:, None] - away[None]
            won += ((gap > 0) + 0.5 * (gap == 0)).mean()
            total += 1
    if not total:
        raise ValueError(f"no pixel has both a neighbour of another part and one of its own part {far:.0%} away")
    return won / total


def neighbour_locality(f: Shaped[AnyArray, "n h w c"], count: int = 8, radius: float = 1.5) -> float:
    """Without labels: the fraction of the `count` most similar tokens within `radius`, over that of all tokens."""
    f = np.asarray(f, np.float64)
    height, width = f.shape[1:3]
    f = f - f.mean((0, 1, 2))
    f = f / np.maximum(np.linalg.norm(f, axis=-1, keepdims=True), 1e-12)
    place = np.stack(np.meshgrid(np.arange(height), np.arange(width), indexing="ij"), -1).reshape(-1, 2)
    distance = np.linalg.norm(place[:, None] - place[None], axis=-1)
    near, self_ = (distance > 0) & (distance <= radius), np.eye(len(place), dtype=bool)
    if not 0 < count < len(place):
        raise ValueError(f"a grid of {height}x{width} has 1 to {len(place) - 1} neighbours per token, got {count=}")
    shares = []
    for features in f.reshape(len(f), -1, f.shape[-1]):
        similar = np.where(self_, -np.inf, features @ features.T)
        chosen = np.argpartition(-similar, count - 1, axis=1)[:, :count]
        shares.append(np.take_along_axis(near, chosen, 1).mean())
    return float(np.mean(shares) / (near.sum() / (~self_).sum()))


def cka(a: Shaped[AnyArray, "... c"], b: Shaped[AnyArray, "... d"]) -> float:
    """Linear centred kernel alignment of two activations over the same positions: 1 if equal up to rotation."""
    a, b = (np.asarray(part, np.float64).reshape(-1, np.shape(part)[-1]) for part in (a, b))
    a, b = a - a.mean(0), b - b.mean(0)
    scale = np.linalg.norm(a.T @ a) * np.linalg.norm(b.T @ b)
    return float(np.square(np.linalg.norm(a.T @ b)) / scale) if scale else 0.0
