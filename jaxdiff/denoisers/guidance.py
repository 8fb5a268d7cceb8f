"""Guidance: away from no condition, from another control, or from a weaker network."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array
from numpy.typing import ArrayLike

from jaxdiff.conditions import Cond
from jaxdiff.denoisers.base import Denoiser, Sigma, check_cond, per_example
from jaxdiff.errors import check_number


def guided(
    denoise: Denoiser,
    scale: ArrayLike,
    null: Cond = None,
    *,
    control_scale: ArrayLike = 1.0,
    control_null: Cond = None,
    interval: tuple[float, float] | None = None,
    weak: Denoiser | None = None,
) -> Denoiser:
    """D_null + scale (D_cond - D_null): classifier-free guidance (Ho & Salimans 2021), one batched call.

    With control_scale other than 1, D_null + scale (control_scale (D_cond - D_free) + D_free - D_null), D_free with
    `control_null` alone (after Berrada et al. 2024); one batched call of three. Without cond there is nothing to guide.

    Args:
        denoise: a conditional denoiser.
        scale: a number or one per example; 1 changes nothing.
        null: the null value of each condition, such as {"label": 1000}; keys it does not list keep their value.
            Without it the second evaluation is a separate call, `denoise(x, sigma, None)`.
        control_scale: weight of control metadata within guidance.
        control_null: the null values of control metadata, such as {"crop": -1.0}, also for the second evaluation.
        interval: (low, high) guides only low < sigma <= high (Kynkaanniemi et al. 2024) and saves the null evaluation
            elsewhere when sigma is a scalar.
        weak: a weaker denoiser to guide away from under the same cond (autoguidance, Karras et al. 2024).

    Returns:
        A denoiser.

    Raises:
        ValueError: null and weak are both given, the interval is empty, or control_scale lacks control_null.

    Example:
        >>> from jaxdiff.denoisers import gaussian_mixture
        >>> mixture = gaussian_mixture(jnp.array([[-1.0], [1.0]]), 0.1)
        >>> strong = guided(mixture, 2.0, null={"label": 2})  # 2 is the whole mixture
        >>> bool(strong(jnp.zeros((1, 1)), 1.0, {"label": jnp.array([1])})[0, 0] > 1)  # beyond the mode
        True
    """
    if null is not None and weak is not None:
        raise ValueError("guided() takes null (classifier-free) or weak (autoguidance), not both")
    check_cond(null)
    check_cond(control_null)
    check_number("guidance", scale)
    check_number("control_scale", control_scale)
    if interval is not None and not 0 <= interval[0] < interval[1]:
        raise ValueError(f"interval must be (low, high) with 0 <= low < high, got {interval}")
    apart = not (isinstance(control_scale, (int, float)) and control_scale == 1)
    if apart and not control_null:
        raise ValueError(
            f"control_scale={control_scale!r} needs the null values of the control signals, for example "
            "control_null={'crop': conditioning.UNKNOWN}"
        )
    nulls = [{}, {**(null or {}), **(control_null or {})}]
    if apart:
        nulls.insert(1, dict(control_null or {}))

    def batched(x: Array, sigma: Sigma, cond: Mapping[str, ArrayLike]) -> tuple[Array, Array]:
        """(D_cond, D_null), with control_scale applied to the first."""
        sigmas = sigma if jnp.ndim(sigma) == 0 else jnp.concatenate([sigma] * len(nulls))
        stacked = _stack_nulls(cond, nulls, x.shape[0])
        full, *free, base = jnp.split(denoise(jnp.concatenate([x] * len(nulls)), sigmas, stacked), len(nulls))
        if apart:
            full = free[0] + per_example(control_scale, x) * (full - free[0])
        return full, base

    def blend(x: Array, sigma: Sigma, cond: Cond = None) -> Array:
        if weak is not None:
            full, base = denoise(x, sigma, cond), weak(x, sigma, cond)
        elif cond is None:
            return denoise(x, sigma, None)
        elif null is None and not control_null:
            full, base = denoise(x, sigma, cond), denoise(x, sigma, None)
        else:
            full, base = batched(x, sigma, cond)
        return base + per_example(scale, x) * (full - base)

    return blend if interval is None else _within(interval, blend, denoise)


def _within(interval: tuple[float, float], inside: Denoiser, outside: Denoiser) -> Denoiser:
    """`inside` for low < sigma <= high, `outside` elsewhere; for a scalar sigma only one of them is computed."""
    low, high = interval

    def transformed(x: Array, sigma: Sigma, cond: Cond = None) -> Array:
        within = (jnp.asarray(sigma) > low) & (jnp.asarray(sigma) <= high)
        if within.ndim == 0:
            return jax.lax.cond(within, lambda: inside(x, sigma, cond), lambda: outside(x, sigma, cond))
        return jnp.where(within.reshape(-1, *(1 for _ in x.shape[1:])), inside(x, sigma, cond), outside(x, sigma, cond))

    return transformed


def _stack_nulls(cond: Mapping[str, ArrayLike], nulls: list[dict[str, ArrayLike]], batch: int) -> dict[str, Array]:
    """cond with the values of each of `nulls` in place of its own, one after the other along the batch axis."""
    stray = set(nulls[-1]) - set(cond)
    if stray:
        raise ValueError(
            f"null names {sorted(stray)} but cond has only {sorted(cond)}; give cond those keys or drop them from null"
        )

    def stack(value: ArrayLike, *others: ArrayLike) -> Array:
        value = jnp.asarray(value)
        value = jnp.broadcast_to(value, (batch, *value.shape[1:]))
        return jnp.concatenate([jnp.broadcast_to(jnp.asarray(other, value.dtype), value.shape) for other in others])

    return {key: stack(value, *(null.get(key, value) for null in nulls)) for key, value in cond.items()}
