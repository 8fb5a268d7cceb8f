"""Exponential moving averages of parameters, in float32: ema <- ema + rate (params - ema), rate = 1 - decay.

Schedules return the rate, which float32 holds to all digits where the decay is too close to 1. By decay:

constant     decay
half_life    0.5^(batch / min(half_life, ramp * images seen))     EDM; both in images
power        (1 - 1/step)^(gamma + 1)                             EDM2's power function; sigma_rel^2 =
                                                                  (gamma + 1) / ((gamma + 2)^2 (gamma + 3))

The power function weights the parameters of time t by p(t) = (gamma + 1) / T (t / T)^gamma, up to the time T of the
average. An average of any width at any time is therefore close to a combination of stored ones (Karras et al. 2024b,
appendix C): the coefficients x of the least-squares fit of their profiles, int (sum_i x_i p_i - p)^2 dt, solve

    sum_j <p_i, p_j> x_j = <p_i, p>,    <p, q> = (g + 1) (h + 1) (S / T)^h / ((g + h + 1) T)    for times S <= T, where
                                                 h is the exponent of the later profile, and are scaled to sum to one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdiff.errors import pick
from jaxdiff.trees import Params

Numbers = float | Sequence[float] | np.ndarray
WIDEST = 0.2886  # gamma = 0, the plain mean over all of training, has width 0.28868

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
    order = np.float32(exponent(sigma_rel) + 1)
    return lambda step, batch: -jnp.expm1(order * jnp.log1p(-1 / step.astype(jnp.float32)))


def exponent(width: float) -> float:
    """gamma of the power function of relative width `width`."""
    if not 0 < width <= WIDEST:
        raise ValueError(f"the relative width of a power-function average must be in (0, {WIDEST}], got {width}")
    t = float(width) ** -2.0
    return float(np.roots([1, 7, 16 - t, 12 - t]).real.max())


def power_decay(width: float, time: Numbers, since: Numbers = 1.0) -> np.ndarray:
    """(1 - since / time)^(gamma + 1) in float64: the decay of an update at `time`, `since` after the one before."""
    return np.asarray((1 - np.asarray(since, np.float64) / np.asarray(time, np.float64)) ** (exponent(width) + 1))


def posthoc_coefficients(in_steps: Numbers, in_widths: Numbers, out_steps: Numbers, out_widths: Numbers) -> np.ndarray:
    """The coefficients [in, out] that combine averages of `in_widths` stored at `in_steps` into those wanted."""
    given, wanted = _profiles(in_steps, in_widths), _profiles(out_steps, out_widths)
    if len(set(zip(*given, strict=True))) < len(given[0]):
        raise ValueError("two of the stored averages have the same step and width; give each once")
    found = np.linalg.solve(_overlaps(given, given), _overlaps(given, wanted))
    return found / found.sum(0)


def _profiles(steps: Numbers, widths: Numbers) -> tuple[np.ndarray, np.ndarray]:
    """Times and exponents, [n] each, in float64."""
    times, sizes = np.atleast_1d(np.asarray(steps, np.float64)), np.asarray(widths, np.float64)
    if times.ndim != 1 or not (np.isfinite(times) & (times > 0)).all():
        raise ValueError(f"averages are at steps above 0, in one dimension, got {np.asarray(steps).tolist()}")
    if not (len(times) and sizes.size) or (sizes.ndim and len(times) > 1 and sizes.shape != times.shape):
        raise ValueError(
            f"each average has a step and a width, or all have one width; got {len(times)} steps and widths of shape "
            f"{sizes.shape}"
        )
    times, sizes = np.broadcast_arrays(times, sizes)
    return times, np.array([exponent(width) for width in sizes.tolist()])


def _overlaps(one: tuple[np.ndarray, np.ndarray], other: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """<p, q> of each profile p of `one` and q of `other`, [one, other]."""
    (s, g), (t, h) = (one[0][:, None], one[1][:, None]), other
    ratio = np.where(s < t, s / t, t / s) ** np.where(s < t, h, g)
    return (g + 1) * (h + 1) * ratio / ((g + h + 1) * np.maximum(s, t))


DECAYS: dict[str, Callable[..., Rate]] = {"constant": constant, "half_life": half_life, "power": power}


def make(name: str, **options: float) -> Rate:
    """A schedule by its name in DECAYS."""
    return pick(DECAYS, name, "EMA kind")(**options)


def average(rate: Array, ema: Params, params: Params) -> Params:
    """One update of the average."""
    return jax.tree.map(lambda e, p: e + rate * (p - e), ema, params)
