"""Exponential moving averages of parameters, in float32: ema <- ema + rate (params - ema), rate = 1 - decay.

Schedules return the rate, which float32 holds to all digits where the decay is too close to 1. By decay:

constant     decay
half_life    0.5^(batch / min(half_life, ramp * images seen))     EDM; both in images
power        (1 - 1/step)^(gamma + 1)                             EDM2's power function; sigma_rel^2 =
                                                                  (gamma + 1) / ((gamma + 2)^2 (gamma + 3))
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdiff.errors import pick
from jaxdiff.trees import Params

Rate = Callable[[Array, int], Array]  # (number of this update, from 1; batch size) -> 1 - decay


def constant(decay: float = 0.9999) -> Rate:
    if not 0 <= decay < 1:
        raise ValueError(f"an EMA decay must be in [0, 1), got {decay}")
    return lambda step, batch: jnp.float32(1 - decay)


def half_life(images: float = 500_000, ramp: float = 0.05) -> Rate:
    def rate(step: Array, batch: int) -> Array:
        seen = (step.astype(jnp.float32) - 1) * batch
        reach = jnp.minimum(images, seen * ramp) if ramp else jnp.float32(images)
        return 1 - 0.5 ** (batch / jnp.maximum(reach, 1e-8))

    return rate


def power(sigma_rel: float = 0.05) -> Rate:
    """sigma_rel is the width of the averaging profile relative to training time."""
    t = sigma_rel**-2.0  # gamma solves gamma^3 + 7 gamma^2 + (16 - t) gamma + 12 - t = 0
    gamma = np.roots([1, 7, 16 - t, 12 - t]).real.max()
    exponent = np.float32(gamma + 1)
    return lambda step, batch: -jnp.expm1(exponent * jnp.log1p(-1 / step.astype(jnp.float32)))


DECAYS: dict[str, Callable[..., Rate]] = {"constant": constant, "half_life": half_life, "power": power}


def make(name: str, **options: float) -> Rate:
    """A schedule by its name in DECAYS."""
    return pick(DECAYS, name, "EMA kind")(**options)


def average(rate: Array, ema: Params, params: Params) -> Params:
    """One update of the average."""
    return jax.tree.map(lambda e, p: e + rate * (p - e), ema, params)
