"""Optimizers from a config: an optax chain with warm-up, decay and clipping, scheduled in images seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
from jax.typing import ArrayLike

from jaxdiff.errors import pick

OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "adam": optax.adam,
    "adamw": optax.adamw,
    "adafactor": optax.adafactor,
    "lion": optax.lion,
    "radam": optax.radam,
    "sgd": optax.sgd,
}


def schedule(
    peak: float, batch_size: int, warmup_images: float = 0, decay: str = "constant", decay_images: float = 0
) -> optax.Schedule:
    """Learning rate by update count; the warm-up counts the batch of the update too, so that the first one moves."""
    after = _decay(decay, decay_images)

    def rate(count: ArrayLike) -> ArrayLike:
        images = jnp.asarray(count, jnp.float32) * batch_size
        warm: ArrayLike = 1.0
        if warmup_images:
            warm = jnp.minimum((images + batch_size) / warmup_images, 1.0)
        return peak * warm * after(images, jnp)

    return rate


def learning_rate(
    images: npt.ArrayLike, peak: float, warmup_images: float = 0, decay: str = "constant", decay_images: float = 0
) -> np.ndarray:
    """The published form in float64: the rate after `images` images, 0 at first if there is a warm-up."""
    seen = np.asarray(images, np.float64)
    warm = np.minimum(seen / warmup_images, 1.0) if warmup_images else 1.0
    return np.asarray(peak * warm * _decay(decay, decay_images)(seen, np))


def _decay(name: str, decay_images: float) -> Callable[[Any, ModuleType], ArrayLike]:
    """The factor after the warm-up by images seen, in NumPy or jax.numpy: constant, cosine, linear, sqrt, step (x0.1).

    cosine and linear reach 0 at `decay_images`; sqrt then decays as sqrt(decay_images / images); step drops there.
    """
    after = pick(_DECAYS, name, "learning-rate decay")
    if name != "constant" and decay_images <= 0:
        raise ValueError(f"decay={name!r} needs decay_images > 0, got {decay_images}")
    return lambda images, xp: after(images / decay_images if decay_images else images, xp)


_DECAYS: dict[str, Callable[[Any, ModuleType], ArrayLike]] = {
    "constant": lambda x, xp: 1.0,
    "cosine": lambda x, xp: 0.5 * (1 + xp.cos(xp.pi * xp.clip(x, 0, 1))),
    "linear": lambda x, xp: (1 - x).clip(0, 1),
    "sqrt": lambda x, xp: x.clip(1) ** -0.5,
    "step": lambda x, xp: xp.where(x < 1, 1.0, 0.1),
}


def make(
    name: str,
    learning_rate: float,
    batch_size: int,
    *,
    clip: float = 0.0,
    warmup_images: float = 0,
    decay: str = "constant",
    decay_images: float = 0,
    options: Mapping[str, Any] | None = None,
) -> optax.GradientTransformation:
    """Clip by global norm (0: off), then the optimizer with its schedule and options (b1, weight_decay, ...)."""
    build = pick(OPTIMIZERS, name, "optimizer")
    rate = schedule(learning_rate, batch_size, warmup_images, decay, decay_images)
    try:
        base = build(rate, **dict(options or {}))
    except TypeError as error:
        raise ValueError(f"optimizer {name!r} does not take {dict(options or {})}: {error}") from None
    return optax.chain(optax.clip_by_global_norm(clip), base) if clip else base
