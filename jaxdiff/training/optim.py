"""Optimizers from a config: an optax chain with warm-up, decay and clipping, scheduled in images seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import optax
from jax import Array
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
    """Learning rate by update count: linear warm-up, then constant, cosine, linear, sqrt or step (x0.1), in images.

    cosine and linear reach 0 at `decay_images`; sqrt then decays as sqrt(decay_images / images); step drops there.
    """
    after = pick(_DECAYS, decay, "learning-rate decay")
    if decay != "constant" and decay_images <= 0:
        raise ValueError(f"decay={decay!r} needs decay_images > 0, got {decay_images}")

    def rate(count: ArrayLike) -> ArrayLike:
        images = jnp.asarray(count, jnp.float32) * batch_size
        relative = images / decay_images if decay_images else images
        warm: ArrayLike = 1.0
        if warmup_images:
            warm = jnp.minimum((images + batch_size) / warmup_images, 1.0)
        return peak * warm * after(relative)

    return rate


_DECAYS: dict[str, Callable[[Array], ArrayLike]] = {
    "constant": lambda x: 1.0,
    "cosine": lambda x: 0.5 * (1 + jnp.cos(jnp.pi * jnp.clip(x, 0, 1))),
    "linear": lambda x: (1 - x).clip(0, 1),
    "sqrt": lambda x: x.clip(1) ** -0.5,
    "step": lambda x: jnp.where(x < 1, 1.0, 0.1),
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
