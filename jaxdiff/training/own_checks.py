"""Checks of a teacher before it teaches: shapes, convention, classes, golden outputs.

A denoiser in the right convention removes noise. With x0 from the data, or from the teacher's own samples,

    r(sigma) = rms(D(x0 + sigma eps, sigma) - x0) / min(sigma, rms(x0 - mean))

is below 1 at every noise level: it beats both returning its input and returning the mean. A wrong sign, time or scale
breaks this at some sigma.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdiff.data import Dataset
from jaxdiff.files import read_npz
from jaxdiff.training.build import IMAGELESS
from jaxdiff.training.loading import SavedRun

LEVELS = (0.1, 0.3, 1.0, 3.0, 10.0)  # in standard deviations of the data, within the sampled noise levels
COUNT = 64  # examples per noise level


class Finding(NamedTuple):
    """One check: what was looked at, whether it is as it should be, and the numbers."""

    name: str
    fine: bool
    text: str


def check(saved: SavedRun, golden: str | os.PathLike = "", tolerance: float = 1e-3) -> list[Finding]:
    """All checks of a teacher, in order."""
    x0, label, source = _examples(saved)
    found = [_shapes(saved), *_removes_noise(saved, x0, label, source)]
    if saved.run.conditions.num_classes:
        found.append(_classes(saved, x0))
    if golden:
        found.append(_golden(saved, Path(golden), tolerance))
    return found


def _examples(saved: SavedRun) -> tuple[np.ndarray, np.ndarray | None, str]:
    data = saved.run.data
    if isinstance(data, Dataset) and saved.config.data.source not in IMAGELESS:
        batch = data.take(0, min(COUNT, data.size))
        return np.asarray(batch["image"], np.float32), batch.get("label"), f"examples of {data.name}"
    images, labels = saved.sampler().sample(saved.params, COUNT, 0, decode=False)
    return images, labels, "the teacher's own samples"


def _cond(saved: SavedRun, label: np.ndarray | None, count: int) -> dict[str, jax.Array] | None:
    classes = saved.run.conditions.num_classes
    if not classes:
        return None
    return {"label": jnp.full(count, classes, jnp.int32) if label is None else jnp.asarray(label, jnp.int32)}


def _shapes(saved: SavedRun) -> Finding:
    shape = saved.run.data.shape
    count = sum(int(np.prod(np.shape(leaf))) for leaf in jax.tree.leaves(saved.params))
    out = saved.denoiser(jnp.zeros((2, *shape)), 1.0, _cond(saved, None, 2))
    fine = tuple(out.shape) == (2, *shape) and bool(jnp.isfinite(out).all())
    classes = saved.run.conditions.num_classes
    return Finding("shapes", fine, f"{shape} in, {tuple(out.shape[1:])} out; {classes} classes; {count:,} parameters")


def _removes_noise(saved: SavedRun, x0: np.ndarray, label: np.ndarray | None, source: str) -> list[Finding]:
    spread = float(np.sqrt(np.square(x0 - x0.mean(0)).mean())) or 1.0
    c = saved.config.sample
    eps = np.asarray(jax.random.normal(jax.random.key(0), x0.shape))
    ratios = {}
    for level in LEVELS:
        sigma = float(np.clip(level * spread, c.sigma_min, c.sigma_max))
        out = saved.denoiser(jnp.asarray(x0 + sigma * eps), sigma, _cond(saved, label, len(x0)))
        ratios[sigma] = float(np.sqrt(np.square(np.asarray(out) - x0).mean())) / min(sigma, spread)
    text = ", ".join(f"{ratio:.2f} at sigma {sigma:.3g}" for sigma, ratio in ratios.items())
    fine = all(ratio < 1.05 for ratio in ratios.values())
    hint = "" if fine else "; above 1 the convention is wrong, or the network is untrained"
    return [Finding("convention", fine, f"error of D over that of a guess, on {source}: {text}{hint}")]


def _classes(saved: SavedRun, x0: np.ndarray) -> Finding:
    """The outputs for two classes differ."""
    x = jnp.asarray(x0[:4])
    sigma = float(np.clip(2 * x0.std(), saved.config.sample.sigma_min, saved.config.sample.sigma_max))
    a, b = (saved.denoiser(x, sigma, {"label": jnp.full(len(x), i, jnp.int32)}) for i in (0, 1))
    change = float(jnp.abs(a - b).max())
    return Finding("classes", change > 0, f"another label changes the output by up to {change:.3g}")


def _golden(saved: SavedRun, path: Path, tolerance: float) -> Finding:
    """Outputs of the original program: arrays x, sigma and x0, and label where there are classes."""
    if not path.is_file():
        raise FileNotFoundError(f"no golden outputs at {path.absolute()}")
    arrays = read_npz(path)
    missing = [name for name in ("x", "sigma", "x0") if name not in arrays]
    if missing:
        raise ValueError(
            f"{path} has {', '.join(arrays)}; golden outputs are x (noisy examples), sigma and x0 (denoised), and "
            f"label with classes: {', '.join(missing)} missing"
        )
    x = jnp.asarray(arrays["x"], jnp.float32)
    sigma = jnp.broadcast_to(jnp.asarray(arrays["sigma"], jnp.float32), x.shape[:1])
    out = np.asarray(saved.denoiser(x, sigma, _cond(saved, arrays.get("label"), len(x))))
    error = float(np.abs(out - arrays["x0"]).max() / max(np.abs(arrays["x0"]).max(), 1e-12))
    text = f"largest error {error:.2g} of the largest value, at most {tolerance:g}"
    return Finding("golden", error <= tolerance, text)
