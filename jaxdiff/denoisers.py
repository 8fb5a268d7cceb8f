"""Denoisers: pure functions `denoise(x, sigma, cond=None) -> x0` with x = x0 + sigma * eps.

Everything in jaxdiff lives in this one coordinate system. A network trained in another convention
becomes a denoiser by one wrapper, which is the only place that knows the convention:

    edm   D = c_skip x + c_out F(c_in x, ln(sigma)/4), with s = sigma_data and r = sqrt(sigma^2 + s^2):
          c_skip = s^2/r^2, c_out = sigma s/r, c_in = 1/r
    ddpm  x_t = sqrt(abar) x0 + sqrt(1-abar) eps = x / sqrt(1+sigma^2), sigma^2 = (1-abar)/abar
          eps: D = x - sigma F
          v = sqrt(abar) eps - sqrt(1-abar) x0: D = x/(1+sigma^2) - sigma/sqrt(1+sigma^2) F
          x0: D = F
    flow  x_t = (1-t) x0 + t eps = (1-t) x, t = sigma/(1+sigma), F = eps - x0: D = x_t - t F

`sigma` is a scalar or one value per example; `cond` is None or a dict with any of the keys in COND_KEYS.
Sources: Karras et al. 2022 (edm), Ho et al. 2020, Salimans & Ho 2022 (eps, v), Esser et al. 2024 (flow).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxdiff.errors import check_ratio, check_sigma, concrete, nearest, pick

COND_KEYS = ("label", "text", "text_mask", "pooled", "control", "step")
Cond = Mapping[str, Any] | None
Sigma = Float[Array, ""] | Float[Array, " b"] | float
Network = Callable[[Array, Array, Cond], Array]


@runtime_checkable
class Denoiser(Protocol):
    """The contract every wrapper below returns and every solver, transform and method takes."""

    def __call__(self, x: Float[Array, "b ..."], sigma: Sigma, cond: Cond = None) -> Float[Array, "b ..."]: ...


def check_cond(cond: Cond) -> None:
    """A condition is None or a dict whose keys are all known."""
    if cond is None:
        return
    if not isinstance(cond, Mapping):
        raise TypeError(f"cond must be None or a dict with keys among {COND_KEYS}, got {type(cond).__name__}")
    for key in cond:
        if key not in COND_KEYS:
            raise ValueError(
                f"unknown cond key {key!r}{nearest(key, COND_KEYS)}; allowed keys are {', '.join(COND_KEYS)}"
            )


def at_least_float32(x: Any) -> Array:
    """x as a floating array of 32 bits or more; half precision is for networks only."""
    x = jnp.asarray(x)
    wide = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize >= 4
    return x if wide else x.astype(jnp.float32)


def per_example(value: Any, x: Array) -> Array:
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


def ddpm(network: Network, abar: Any, prediction: str = "eps") -> Denoiser:
    """A discrete-time variance-preserving network; `abar[t]` is the share of signal variance at its timestep t.

    A sigma between two timesteps is given to the network as a fractional timestep, linear in log sigma;
    one outside the table as the nearest end. A network that also predicts variances (twice the channels)
    has them dropped.
    """
    formula = pick(_PREDICTIONS, prediction, "prediction")
    log_sigmas = np.log(sigma_table(abar))

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


_PREDICTIONS: dict[str, Callable[[Array, Array, Array], Array]] = {
    "eps": lambda x, sigma, out: x - sigma * out,
    "v": lambda x, sigma, out: x / (1 + sigma**2) - sigma / jnp.sqrt(1 + sigma**2) * out,
    "x0": lambda x, sigma, out: out,
}


def flow(network: Network, time_scale: float = 1000.0) -> Denoiser:
    """A rectified-flow network predicting eps - x0; it is told `time_scale * t`, t = sigma / (1 + sigma)."""

    def formula(x: Array, sigma: Array, cond: Cond) -> Array:
        t = sigma / (1 + sigma)
        x_t = (1 - t) * x
        return x_t - t * network(x_t, _label(time_scale * t, x), cond).astype(x.dtype)

    return _denoiser(formula)


# How far a network's noise label (and sigma_data) lies between clean data, u = 0, and pure noise, u = 1, by wrapper.
# That of ddpm counts timesteps of a table of 1000, shifted or not: it is the network's own time.
PROGRESS: dict[str, Callable[[Any, float], Any]] = {
    "edm": lambda label, sigma_data: 2 / np.pi * jnp.arctan(jnp.exp(4 * label) / sigma_data),
    "ddpm": lambda label, sigma_data: label / 999,
    "flow": lambda label, sigma_data: label / 1000,
}


def linear_abar(steps: int = 1000, first: float = 1e-4, last: float = 2e-2) -> np.ndarray:
    """The DDPM table: betas linear in the timestep (DiT, ADM)."""
    return np.cumprod(1 - np.linspace(first, last, steps))


def sqrt_linear_abar(steps: int = 1000, first: float = 0.00085, last: float = 0.012) -> np.ndarray:
    """The latent-diffusion table: square roots of betas linear in the timestep (Stable Diffusion's values)."""
    return np.cumprod(1 - np.linspace(first**0.5, last**0.5, steps) ** 2)


def cosine_abar(steps: int = 1000, offset: float = 0.008, max_beta: float = 0.999) -> np.ndarray:
    """The improved-DDPM table: abar = cos^2 of a linear angle, betas capped at `max_beta`."""
    curve = np.cos((np.linspace(0, 1, steps + 1) + offset) / (1 + offset) * np.pi / 2) ** 2
    return np.cumprod(1 - np.minimum(1 - curve[1:] / curve[:-1], max_beta))


def rescaled_abar(abar: Any, ratio: float) -> np.ndarray:
    """The table for images `ratio` times as large, sigma' = ratio sigma: abar' = abar / (ratio^2 + abar (1 - ratio^2)).

    A patch of the small image is seen ratio^2 times in the large one, which averages its noise away: with
    SNR' = SNR / ratio^2 the same timestep means the same uncertainty again (Berrada et al. 2024).
    """
    check_ratio(ratio)
    table = np.asarray(abar, np.float64)
    return table / (ratio**2 + table * (1 - ratio**2))


def sigma_table(abar: Any) -> np.ndarray:
    """The noise levels sqrt((1-abar)/abar) of a discrete table, ascending, float64."""
    table = np.asarray(abar, np.float64)
    if table.ndim != 1 or len(table) < 2 or not (np.diff(table) < 0).all() or not (table[-1] > 0 and table[0] < 1):
        raise ValueError(
            f"abar must be a 1-D table that falls strictly inside (0, 1), got shape {table.shape}"
            + (f" from {table.flat[0]:.4g} to {table.flat[-1]:.4g}" if table.size else "")
            + "; pass the cumulative product of 1 - beta, for example denoisers.linear_abar()"
        )
    return np.sqrt((1 - table) / table)


# ---------------------------------------------------------------------------------------------- closed forms


def gaussian(mean: Any, std: Any) -> Denoiser:
    """The exact denoiser of N(mean, std^2): D = (std^2 x + sigma^2 mean) / (std^2 + sigma^2), elementwise."""

    def formula(x: Array, sigma: Array, cond: Cond) -> Array:
        m, s = jnp.asarray(mean, x.dtype), jnp.asarray(std, x.dtype)
        return m + (x - m) * s**2 / (s**2 + sigma**2)

    return _denoiser(formula)


def gaussian_mixture(means: Any, stds: Any, weights: Any = None) -> Denoiser:
    """The exact denoiser of sum_k weights_k N(means_k, stds_k^2): the posterior mean over components.

    `means` is [k ...], `stds` a scalar, [k], or anything that broadcasts against means (diagonal covariances);
    `weights` are normalised, equal when None. With cond {"label": i} it is the denoiser of component i alone
    (label k = the whole mixture), so a mixture can be guided like any class-conditional model.
    """
    means, stds = np.asarray(means), np.asarray(stds)
    k, event = means.shape[0], means.shape[1:]
    stds = np.broadcast_to(stds.reshape(stds.shape + (1,) * len(event)) if stds.shape == (k,) else stds, means.shape)
    weights = np.ones(k) if weights is None else np.asarray(weights)
    if weights.shape != (k,) or (weights <= 0).any() or (stds <= 0).any():
        raise ValueError(
            f"a mixture of {k} components needs {k} positive weights and positive stds, got weights {weights.shape}"
        )
    axes = tuple(range(-len(event), 0))

    def formula(x: Array, sigma: Array, cond: Cond) -> Array:
        if x.shape[x.ndim - len(event) :] != event:
            raise ValueError(f"this mixture lives on shape {event}, got x of shape {x.shape}")
        m, s2 = jnp.asarray(means, x.dtype), jnp.asarray(stds, x.dtype) ** 2
        x_k = jnp.expand_dims(x, -1 - len(event))
        var = s2 + (sigma if sigma.ndim == 0 else jnp.expand_dims(sigma, -1 - len(event))) ** 2
        logits = jnp.asarray(np.log(weights / weights.sum()), x.dtype)
        logits -= 0.5 * ((x_k - m) ** 2 / var + jnp.log(var)).sum(axes)
        if cond is not None and "label" in cond:
            _check_label(cond["label"], k)
            label = jnp.asarray(cond["label"])[..., None]
            logits = jnp.where((label == k) | (label == jnp.arange(k)), logits, -jnp.inf)
        share = jax.nn.softmax(logits).reshape(*logits.shape, *(1 for _ in event))
        return (share * (m + (x_k - m) * s2 / var)).sum(-1 - len(event))

    return _denoiser(formula)


def _check_label(label: Any, k: int) -> None:
    seen = concrete(label)
    if seen is not None and ((seen < 0) | (seen > k)).any():
        raise ValueError(f"labels of a mixture of {k} are 0..{k - 1}, or {k} for all of it; got {seen}")


# ---------------------------------------------------------------------------------------------- transforms


def guided(
    denoise: Denoiser,
    scale: Any,
    null: Cond = None,
    *,
    control_scale: Any = 1.0,
    interval: tuple[float, float] | None = None,
    weak: Denoiser | None = None,
) -> Denoiser:
    """D_null + scale (D_cond - D_null): classifier-free guidance (Ho & Salimans 2021), one batched call.

    `null` holds the values that stand for "no condition", one example's worth or a batch, for example
    {"label": 1000}; keys it does not name keep their value, and one number stands for every entry of a dict.
    control_scale other than 1 weighs control apart from the semantic conditions (Berrada et al. 2024, as recalled):
    D_null + scale (control_scale (D_cond - D_free) + D_free - D_null), D_free with null["control"] alone; a batched
    call of three. Without `null` the second evaluation is
    `denoise(x, sigma, None)`, a call of its own. Called without cond there is nothing to guide: D(x, sigma, None).
    `interval` = (low, high) guides only low < sigma <= high (Kynkaanniemi et al. 2024) and saves the null evaluation
    elsewhere when sigma is a scalar.
    `weak` is a second, worse denoiser to be guided away from under the same cond (autoguidance, Karras et al. 2024).
    """
    if null is not None and weak is not None:
        raise ValueError("guided() takes null (classifier-free) or weak (autoguidance), not both")
    check_cond(null)
    if interval is not None and not 0 <= interval[0] < interval[1]:
        raise ValueError(f"interval must be (low, high) with 0 <= low < high, got {interval}")
    apart = not (isinstance(control_scale, (int, float)) and control_scale == 1)
    if apart and "control" not in (null or {}):
        raise ValueError(
            f"control_scale={control_scale} needs the values that stand for no control, for example "
            "null={'label': 1000, 'control': conditioning.UNKNOWN}"
        )

    def blend(x: Array, sigma: Sigma, cond: Cond) -> Array:
        if weak is None and cond is None:
            return denoise(x, sigma, None)
        if weak is not None:
            full, base = denoise(x, sigma, cond), weak(x, sigma, cond)
        elif null is None or cond is None:
            full, base = denoise(x, sigma, cond), denoise(x, sigma, None)
        else:
            nulls = [{}, {"control": null["control"]}, null] if apart else [{}, null]
            sigmas = sigma if jnp.ndim(sigma) == 0 else jnp.concatenate([sigma] * len(nulls))
            stacked = _stack_nulls(cond, nulls, x.shape[0])
            full, *free, base = jnp.split(denoise(jnp.concatenate([x] * len(nulls)), sigmas, stacked), len(nulls))
            if apart:
                full = free[0] + per_example(control_scale, x) * (full - free[0])
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


def _stack_nulls(cond: Mapping[str, Any], nulls: list[Any], batch: int) -> dict[str, Any]:
    """cond with the values of each of `nulls` in place of its own, one after the other along the batch axis."""
    stray = set(nulls[-1]) - set(cond)
    if stray:
        raise ValueError(
            f"null names {sorted(stray)} but cond has only {sorted(cond)}; give cond those keys or drop them from null"
        )

    def stack(value: Any, *others: Any) -> Array:
        value = jnp.asarray(value)
        value = jnp.broadcast_to(value, (batch, *value.shape[1:]))
        return jnp.concatenate([jnp.broadcast_to(jnp.asarray(other, value.dtype), value.shape) for other in others])

    def fill(key: str, value: Any) -> Any:
        return jax.tree.map(stack, value, *(null_like(null.get(key, value), value) for null in nulls))

    return {key: fill(key, value) for key, value in cond.items()}


def null_like(null: Any, value: Any) -> Any:
    """A null value in the structure of the condition it stands for: one number is that of every entry of a dict."""
    return dict.fromkeys(value, null) if isinstance(value, Mapping) and not isinstance(null, Mapping) else null


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
