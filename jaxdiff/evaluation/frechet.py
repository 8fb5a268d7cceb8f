"""The Fréchet distance between two Gaussians fitted to features, from moments streamed in float64 on the host.

    d^2 = |m_a - m_b|^2 + tr(C_a + C_b - 2 (C_a C_b)^(1/2))          Dowson & Landau 1982; Heusel et al. 2017 (FID)

With C = F F^T the trace of the root is the sum of the singular values of F_a^T F_b: their squares are the eigenvalues
of C_a^(1/2) C_b C_a^(1/2). Nothing complex arises, and singular covariances (of too few samples) cost no accuracy.
Covariances are the unbiased ones (n - 1), as in the public FID programs.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from jaxdiff.files import read_npz, replacing
from jaxdiff.remote import local


@dataclasses.dataclass(frozen=True, eq=False)
class Moments:
    """Count, mean and scatter (the sum of centred outer products) of the features seen so far."""

    count: int
    mean: np.ndarray  # [d]
    scatter: np.ndarray  # [d, d]

    @property
    def covariance(self) -> np.ndarray:
        """The unbiased covariance [d, d]."""
        if self.count < 2:
            raise ValueError(f"a covariance needs at least 2 samples, got {self.count}; give more features")
        return self.scatter / (self.count - 1)


def empty(features: int) -> Moments:
    """The moments of no sample at all, of width `features`; what `update` starts from."""
    return Moments(0, np.zeros(features), np.zeros((features, features)))


def update(moments: Moments | None, features: ArrayLike | Moments) -> Moments:
    """Moments that also hold the rows of `features` [n, d]; None if there is no sample yet."""
    x = check_features(features)
    if len(x) == 0:
        return empty(x.shape[1]) if moments is None else moments
    mean = x.mean(0)
    centred = x - mean
    batch = Moments(len(x), mean, centred.T @ centred)
    return batch if moments is None else merge(moments, batch)


def merge(a: Moments, b: Moments) -> Moments:
    """Moments of both sets together: Chan, Golub & LeVeque's update, stable where sums of squares are not."""
    if a.mean.shape != b.mean.shape:
        raise ValueError(f"cannot merge moments of width {len(a.mean)} and {len(b.mean)}: not the same feature network")
    count = a.count + b.count
    if count == 0:
        return a
    delta = b.mean - a.mean
    scatter = a.scatter + b.scatter + np.outer(delta, delta) * (a.count * b.count / count)
    return Moments(count, a.mean + delta * (b.count / count), scatter)


def moments_of(features: ArrayLike | Moments) -> Moments:
    """Moments of an array [n, d], or moments as they are."""
    return features if isinstance(features, Moments) else update(None, features)


def frechet_distance(a: ArrayLike | Moments, b: ArrayLike | Moments) -> float:
    """The squared Fréchet distance of two sets of features, each an array [n, d] or `Moments`."""
    a, b = moments_of(a), moments_of(b)
    if a.mean.shape != b.mean.shape:
        raise ValueError(
            f"features of width {len(a.mean)} and {len(b.mean)} cannot be compared; use one feature network for both"
        )
    for side, moments in (("first", a), ("second", b)):
        if moments.count < 2:
            raise ValueError(f"the {side} set has {moments.count} sample(s); a distance needs at least 2 of each")
    cov_a, cov_b = a.covariance, b.covariance
    cross = np.linalg.svd(_factor(cov_a).T @ _factor(cov_b), compute_uv=False).sum()
    distance = np.square(a.mean - b.mean).sum() + np.trace(cov_a) + np.trace(cov_b) - 2 * cross
    return max(float(distance), 0.0)  # rounding alone can make it negative


def _factor(covariance: np.ndarray) -> np.ndarray:
    """F with F F^T = C for a positive semi-definite C; eigenvalues below zero are rounding errors."""
    values, vectors = np.linalg.eigh((covariance + covariance.T) / 2)
    return vectors * np.sqrt(np.maximum(values, 0))


def check_features(features: ArrayLike | Moments, name: str = "features") -> np.ndarray:
    """Features as float64 [n, d], all finite."""
    x = np.asarray(features)
    if x.ndim != 2:
        raise ValueError(f"{name} must be an array [n, d], got shape {x.shape}; flatten or pool them first")
    if not (np.issubdtype(x.dtype, np.number) or x.dtype.name == "bfloat16") or np.iscomplexobj(x):
        raise ValueError(f"{name} must be real numbers, got dtype {x.dtype}")
    x = x.astype(np.float64)
    bad = ~np.isfinite(x).all(1)
    if bad.any():
        raise ValueError(
            f"{bad.sum()} of {len(x)} rows of {name} are not finite, the first is row {bad.argmax()}; "
            "inspect the images, a sampler may have diverged"
        )
    return x


def save_moments(
    path: str | os.PathLike, moments: Moments, *, spatial: Moments | None = None, protocol: str = ""
) -> None:
    """Reference statistics as `.npz` with mu, sigma and count; other FID programs read the first two.

    `spatial` moments are added as mu_s and sigma_s, ADM's names; `protocol` says in JSON how they were computed.
    """
    if Path(path).suffix != ".npz":
        raise ValueError(f"reference statistics are written as .npz, got the name {Path(path).name!r}")
    arrays = {"mu": moments.mean, "sigma": moments.covariance, "count": np.asarray(moments.count)}
    if spatial is not None:
        arrays |= {"mu_s": spatial.mean, "sigma_s": spatial.covariance}
    if protocol:
        arrays["protocol"] = np.asarray(protocol)
    with replacing(path) as partial:
        np.savez(partial, allow_pickle=False, **arrays)


def load_moments(path: str | os.PathLike, count: int | None = None, *, default_count: int | None = None) -> Moments:
    """Reference statistics from an `.npz` with mu and sigma, as EDM, ADM, pytorch-fid and clean-fid write them.

    `count` is the number of images, which must agree with that of the file; `default_count` applies if it has none.
    """
    return load_stats(path, count, default_count=default_count)[0]


def load_stats(
    path: str | os.PathLike, count: int | None = None, *, default_count: int | None = None
) -> tuple[Moments, Moments | None, str | None]:
    """As `load_moments`, with moments of spatial features and the protocol of the file, where it has them."""
    path = local(path)
    if not path.is_file():
        raise FileNotFoundError(f"no reference statistics at {path}; tried {path.resolve()}")
    arrays = read_npz(path, ("mu", "sigma", "mu_s", "sigma_s", "count", "protocol"))
    stored = int(arrays["count"]) if "count" in arrays else None
    protocol = str(arrays["protocol"]) if "protocol" in arrays else None
    if stored is not None and count is not None and stored != count:
        raise ValueError(f"{path} was computed from {stored} images, but count={count} was given")
    total = next((n for n in (stored, count, default_count) if n is not None), None)
    pairs = [("mu", "sigma")] + [("mu_s", "sigma_s")] * ("mu_s" in arrays)
    found = [_moments_in(path, arrays, *names, total) for names in pairs]
    return found[0], found[1] if len(found) > 1 else None, protocol


def _moments_in(
    path: str | os.PathLike, arrays: Mapping[str, np.ndarray], mu: str, sigma: str, count: int | None
) -> Moments:
    absent = [name for name in (mu, sigma) if name not in arrays]
    if absent:
        held = ", ".join(np.load(path, allow_pickle=False).files)
        raise ValueError(f"{path} has no {' and no '.join(absent)}, only {held}")
    mean, covariance = (np.asarray(arrays[name], np.float64) for name in (mu, sigma))
    if covariance.shape != 2 * mean.shape or mean.ndim != 1:
        raise ValueError(f"{path}: {mu} is {mean.shape} and {sigma} {covariance.shape}, expected [d] and [d, d]")
    if not (np.isfinite(mean).all() and np.isfinite(covariance).all()):
        raise ValueError(f"{path} contains non-finite numbers; compute the statistics again")
    if count is None:
        raise ValueError(f"{path} does not store its number of images; pass count=50000, or set eval.reference to it")
    return Moments(count, mean, covariance * (count - 1))
