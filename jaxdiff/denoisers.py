"""Denoisers: pure functions `denoise(x, sigma, cond=None) -> x0` with x = x0 + sigma * eps.

Everything in jaxdiff lives in this one coordinate system. A network trained in another convention
becomes a denoiser by one wrapper, the only place where the convention appears:

    edm   D = c_skip x + c_out F(c_in x, ln(sigma)/4), with s = sigma_data and r = sqrt(sigma^2 + s^2):
          c_skip = s^2/r^2, c_out = sigma s/r, c_in = 1/r
    ddpm  x_t = sqrt(alpha_bar) x0 + sqrt(1-alpha_bar) eps = x / sqrt(1+sigma^2), sigma^2 = (1-alpha_bar)/alpha_bar
          eps: D = x - sigma F
          v = sqrt(alpha_bar) eps - sqrt(1-alpha_bar) x0: D = x/(1+sigma^2) - sigma/sqrt(1+sigma^2) F
          x0: D = F
    flow  x_t = (1-t) x0 + t eps = (1-t) x, t = sigma/(1+sigma), F = eps - x0: D = x_t - t F

`sigma` is a scalar or one value per example; `cond` is None or a dict of what the network is conditioned on, in which
every array has one row per example (jaxdiff/conditions.py).
Sources: Karras et al. 2022 (edm), Ho et al. 2020, Salimans & Ho 2022 (eps, v), Esser et al. 2024 (flow).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

from jaxdiff.conditions import Cond
from jaxdiff.errors import check_sigma, choose, concrete, pick
from jaxdiff.schedules import sigma_table

Sigma = Float[Array, ""] | Float[Array, " b"] | float
Network = Callable[[Array, Array, Cond], Array]


@runtime_checkable
class Denoiser(Protocol):
    """The contract every wrapper below returns and every solver, transform and method takes."""

    def __call__(self, x: Float[Array, "b ..."], sigma: Sigma, cond: Cond = None) -> Float[Array, "b ..."]: ...


def check_cond(cond: Cond) -> None:
    """A condition is None or a dict; the network checks its keys."""
    if cond is not None and not isinstance(cond, Mapping):
        raise TypeError(f"cond must be None or a dict such as {{'label': labels}}, got {type(cond).__name__}")


def at_least_float32(x: ArrayLike) -> Array:
    """x as a floating array of 32 bits or more; half precision is for networks only."""
    x = jnp.asarray(x)
    wide = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize >= 4
    return x if wide else x.astype(jnp.float32)


def per_example(value: ArrayLike, x: Array) -> Array:
    """A scalar, or one value per example, shaped to multiply x [b ...]; in x's dtype."""
    value = jnp.asarray(value, x.dtype)
    if value.ndim == 0:
        return value
    if value.shape != x.shape[:1]:
        raise ValueError(f"expected a scalar or one value per example, shape {x.shape[:1]}, got shape {value.shape}")
    return value.reshape(value.shape + (1,) * (x.ndim - 1))


def _label(value: Array, x: Array) -> Array:
    """Noise labels as networks take them: float32, one per example."""
    return jnp.broadcast_to(jnp.asarray(value, jnp.float32).reshape(-1), x.shape[:1])


# ---------------------------------------------------------------------------------------------- networks


def _denoiser(formula: Callable[[Array, Array, Cond], Array]) -> Denoiser:
    """Checks shared by every denoiser, around `formula(x, sigma, cond)` with sigma shaped to multiply x."""

    def denoise(x: Array, sigma: Sigma, cond: Cond = None) -> Array:
        check_sigma(sigma)
        check_cond(cond)
        x = at_least_float32(x)
        return formula(x, per_example(sigma, x), cond)

    return denoise


def edm(network: Network, sigma_data: float = 0.5) -> Denoiser:
    """A network preconditioned as in EDM: it sees unit variance and predicts a unit-variance mix of x0 and eps."""

    def formula(x: Array, sigma: Array, cond: Cond) -> Array:
        total = jnp.sqrt(sigma**2 + sigma_data**2)
        out = network(x / total, _label(jnp.log(sigma) / 4, x), cond).astype(x.dtype)
        return (sigma_data / total) ** 2 * x + sigma * sigma_data / total * out

    return _denoiser(formula)


def ddpm(network: Network, alpha_bar: ArrayLike, prediction: str = "eps") -> Denoiser:
    """A discrete-time variance-preserving network; `alpha_bar[t]` is the share of signal variance at its timestep t.

    A sigma between two timesteps is given to the network as a fractional timestep, linear in log sigma;
    one outside the table is clamped to it. Predicted variances (a network with twice the channels)
    are dropped.
    """
    formula = pick(PREDICTIONS, prediction, "prediction")
    log_sigmas = np.log(sigma_table(alpha_bar))

    def denoise(x: Array, sigma: Array, cond: Cond) -> Array:
        timestep = jnp.interp(
            jnp.log(sigma).astype(jnp.float32),
            jnp.asarray(log_sigmas, jnp.float32),
            np.arange(len(log_sigmas), dtype=np.float32),
        )
        out = network(x / jnp.sqrt(1 + sigma**2), _label(timestep, x), cond)
        if out.shape[-1] == 2 * x.shape[-1]:
            out = out[..., : x.shape[-1]]
        return formula(x, sigma, out.astype(x.dtype))

    return _denoiser(denoise)


PREDICTIONS: dict[str, Callable[[Array, Array, Array], Array]] = {
    "eps": lambda x, sigma, out: x - sigma * out,
    "v": lambda x, sigma, out: x / (1 + sigma**2) - sigma / jnp.sqrt(1 + sigma**2) * out,
    "x0": lambda x, sigma, out: out,
}


def flow(network: Network, time_scale: float = 1000.0) -> Denoiser:
    """A rectified-flow network predicting eps - x0, with noise label `time_scale * t`, t = sigma / (1 + sigma)."""

    def formula(x: Array, sigma: Array, cond: Cond) -> Array:
        t = sigma / (1 + sigma)
        x_t = x / (1 + sigma)  # (1 - t) x; 1 - t has no digits left at large sigma
        return x_t - t * network(x_t, _label(time_scale * t, x), cond).astype(x.dtype)

    return _denoiser(formula)


# ---------------------------------------------------------------------------------------------- closed forms


def gaussian(mean: ArrayLike, std: ArrayLike) -> Denoiser:
    """The exact denoiser of N(mean, std^2): D = (std^2 x + sigma^2 mean) / (std^2 + sigma^2), elementwise."""

    def formula(x: Array, sigma: Array, cond: Cond) -> Array:
        m, s = jnp.asarray(mean, x.dtype), jnp.asarray(std, x.dtype)
        return m + (x - m) * s**2 / (s**2 + sigma**2)

    return _denoiser(formula)


def gaussian_mixture(means: ArrayLike, stds: ArrayLike, weights: ArrayLike | None = None) -> Denoiser:
    """The exact denoiser of sum_k weights_k N(means_k, stds_k^2): the posterior mean over components.

    `means` is [k ...], `stds` a scalar, [k], or anything that broadcasts against means (diagonal covariances);
    `weights` are normalised, equal when None. With cond {"label": i} it is the denoiser of component i alone
    (label k = the whole mixture), so a mixture can be guided like any class-conditional model.
    """
    means, stds = np.asarray(means), np.asarray(stds)
    k, event = means.shape[0], means.shape[1:]
    if stds.shape == (k,):
        stds = stds.reshape(stds.shape + (1,) * len(event))
    stds = np.broadcast_to(stds, means.shape)
    weights = np.ones(k) if weights is None else np.asarray(weights)
    if weights.shape != (k,) or (weights <= 0).any() or (stds <= 0).any():
        raise ValueError(
            f"a mixture of {k} components needs {k} positive weights and positive stds, got weights {weights.shape}"
        )
    axes = tuple(range(-len(event), 0))

    def formula(x: Array, sigma: Array, cond: Cond) -> Array:
        if x.shape[x.ndim - len(event) :] != event:
            raise ValueError(f"this mixture has points of shape {event}, got x of shape {x.shape}")
        m, s2 = jnp.asarray(means, x.dtype), jnp.asarray(stds, x.dtype) ** 2
        x_k = jnp.expand_dims(x, -1 - len(event))
        if sigma.ndim:
            sigma = jnp.expand_dims(sigma, -1 - len(event))
        var = s2 + sigma**2
        logits = jnp.asarray(np.log(weights / weights.sum()), x.dtype)
        logits -= 0.5 * ((x_k - m) ** 2 / var + jnp.log(var)).sum(axes)
        for key in cond or {}:
            choose(key, ("label",), "condition of a mixture")
        if cond is not None and "label" in cond:
            _check_label(cond["label"], k)
            label = jnp.asarray(cond["label"])[..., None]
            logits = jnp.where((label == k) | (label == jnp.arange(k)), logits, -jnp.inf)
        share = jax.nn.softmax(logits).reshape(*logits.shape, *(1 for _ in event))
        return (share * (m + (x_k - m) * s2 / var)).sum(-1 - len(event))

    return _denoiser(formula)


def _check_label(label: ArrayLike, k: int) -> None:
    seen = concrete(label)
    if seen is not None and ((seen < 0) | (seen > k)).any():
        raise ValueError(f"labels of a mixture of {k} components are 0..{k - 1}, {k} is the whole mixture; got {seen}")


# ---------------------------------------------------------------------------------------------- transforms


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

    `null` holds the null value of each condition, for one example or a batch, such as {"label": 1000}; keys it does not
    list keep their value. `control_null` holds those of control metadata, such as {"crop": -1.0}, which the
    unconditional evaluation gets too; control_scale other than 1 weights control separately from the semantic
    conditions (after Berrada et al. 2024): D_null + scale (control_scale (D_cond - D_free) +
    D_free - D_null), D_free with `control_null` alone; one batched call of three. Without `null` the second evaluation
    is a separate call, `denoise(x, sigma, None)`. Without cond there is nothing to guide: D(x, sigma, None).
    `interval` = (low, high) guides only low < sigma <= high (Kynkaanniemi et al. 2024) and saves the null evaluation
    elsewhere when sigma is a scalar.
    `weak` is a second, weaker denoiser to guide away from under the same cond (autoguidance, Karras et al. 2024).
    """
    if null is not None and weak is not None:
        raise ValueError("guided() takes null (classifier-free) or weak (autoguidance), not both")
    check_cond(null)
    check_cond(control_null)
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

    def blend(x: Array, sigma: Sigma, cond: Cond) -> Array:
        if weak is not None:
            full, base = denoise(x, sigma, cond), weak(x, sigma, cond)
        elif cond is None:
            return denoise(x, sigma, None)
        elif null is None and not control_null:
            full, base = denoise(x, sigma, cond), denoise(x, sigma, None)
        else:
            full, base = batched(x, sigma, cond)
        return base + per_example(scale, x) * (full - base)

    def transformed(x: Array, sigma: Sigma, cond: Cond = None) -> Array:
        if interval is None:
            return blend(x, sigma, cond)
        low, high = interval
        inside = (jnp.asarray(sigma) > low) & (jnp.asarray(sigma) <= high)
        if inside.ndim == 0:
            return jax.lax.cond(inside, lambda: blend(x, sigma, cond), lambda: denoise(x, sigma, cond))
        return jnp.where(inside.reshape(-1, *(1 for _ in x.shape[1:])), blend(x, sigma, cond), denoise(x, sigma, cond))

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


def score(denoise: Denoiser) -> Denoiser:
    """The score of the noisy density, (D - x) / sigma^2 (Tweedie)."""

    def transformed(x: Array, sigma: Sigma, cond: Cond = None) -> Array:
        x = at_least_float32(x)
        return (denoise(x, sigma, cond) - x) / per_example(sigma, x) ** 2

    return transformed


def noise_prediction(denoise: Denoiser) -> Denoiser:
    """The predicted eps, (x - D) / sigma, which is also the slope dx/dsigma of the probability-flow ODE."""

    def transformed(x: Array, sigma: Sigma, cond: Cond = None) -> Array:
        x = at_least_float32(x)
        return (x - denoise(x, sigma, cond)) / per_example(sigma, x)

    return transformed


def velocity(denoise: Denoiser) -> Denoiser:
    """The rectified-flow velocity eps - x0 = (x - D) / sigma - D; the inverse of `flow`."""

    def transformed(x: Array, sigma: Sigma, cond: Cond = None) -> Array:
        x = at_least_float32(x)
        x0 = denoise(x, sigma, cond)
        return (x - x0) / per_example(sigma, x) - x0

    return transformed


def one_step(denoise: Denoiser, sigma_star: float, scale: float = 1.0) -> Callable[..., Array]:
    """A generator `g(z, cond=None) = D(scale sigma_star z, sigma_star, cond)` of unit Gaussian z."""
    check_sigma(sigma_star)
    return lambda z, cond=None: denoise(scale * sigma_star * z, sigma_star, cond)


def thresholded(denoise: Denoiser, percentile: float = 99.5, floor: float = 1.0) -> Denoiser:
    """Dynamic thresholding (Saharia et al. 2022): clip x0 to its own percentile s >= floor, then divide by s / floor.

    For pixels in [-1, 1] only; latents have no such range.
    """
    if not 0 < percentile <= 100:
        raise ValueError(f"percentile must be in (0, 100], got {percentile}")

    def transformed(x: Array, sigma: Sigma, cond: Cond = None) -> Array:
        x0 = denoise(x, sigma, cond)
        axes = tuple(range(1, x0.ndim))
        s = jnp.maximum(jnp.percentile(jnp.abs(x0), percentile, axis=axes, keepdims=True), floor)
        return jnp.clip(x0, -s, s) * (floor / s)

    return transformed
