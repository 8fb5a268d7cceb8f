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

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from numpy.typing import ArrayLike

from jaxdiff.conditions import Cond
from jaxdiff.denoisers.base import Denoiser, Network, Sigma, at_least_float32, check_cond, per_example
from jaxdiff.denoisers.guidance import guided
from jaxdiff.errors import check_positive, check_sigma, choose, concrete, pick
from jaxdiff.schedules import sigma_table

__all__ = [
    "PREDICTIONS",
    "Denoiser",
    "at_least_float32",
    "check_cond",
    "ddpm",
    "edm",
    "flow",
    "gaussian",
    "gaussian_mixture",
    "guided",
    "noise_prediction",
    "one_step",
    "per_example",
    "score",
    "thresholded",
    "velocity",
]


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
    """A network preconditioned as in EDM: it sees unit variance and predicts a unit-variance mix of x0 and eps.

    Args:
        network: `network(x, noise_label, cond) -> array`, such as `models.bind(model, params)`.
        sigma_data: standard deviation of the data it was trained on.

    Returns:
        A denoiser.

    Example:
        >>> denoise = edm(lambda x, noise_label, cond: 0 * x)  # a network that has learnt nothing
        >>> denoise(jnp.ones((1, 2)), 0.5).round(4)  # half of x, since noise and data are equally strong
        Array([[0.5, 0.5]], dtype=float32)
    """
    check_positive("sigma_data, the standard deviation of the data,", sigma_data)

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

    Args:
        network: `network(x, timestep, cond) -> array`.
        alpha_bar: the table it was trained with, `schedules.linear_alpha_bar()` for example.
        prediction: what it predicts, "eps", "v" or "x0".

    Returns:
        A denoiser.

    Example:
        >>> from jaxdiff import schedules
        >>> denoise = ddpm(lambda x, timestep, cond: 0 * x, schedules.linear_alpha_bar(), "eps")
        >>> denoise(jnp.ones((1, 2)), 0.5)  # no noise is predicted, so nothing is removed
        Array([[1., 1.]], dtype=float32)
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


def flow(network: Network, time_scale: float = 1000.0, to_data: bool = False) -> Denoiser:
    """A rectified-flow network predicting eps - x0, with noise label `time_scale * t`, t = sigma / (1 + sigma).

    With `to_data` (SiT) its time runs from noise to data: label `time_scale * (1 - t)`, prediction x0 - eps. Of twice
    the channels, the second half is ignored.

    Args:
        network: `network(x_t, time, cond) -> array`.
        time_scale: 1000 for SD3 and FLUX, 1 for SiT.
        to_data: the direction of its time.

    Returns:
        A denoiser.

    Example:
        >>> denoise = flow(lambda x, time, cond: 0 * x)
        >>> denoise(jnp.ones((1, 2)), 1.0)  # x_t = x / 2 at t = 1/2
        Array([[0.5, 0.5]], dtype=float32)
    """
    check_positive("time_scale, the noise label of pure noise,", time_scale)
    sign = -1 if to_data else 1

    def formula(x: Array, sigma: Array, cond: Cond) -> Array:
        t = sigma / (1 + sigma)
        x_t = x / (1 + sigma)  # (1 - t) x; 1 - t has no digits left at large sigma
        time = 1 / (1 + sigma) if to_data else t
        out = network(x_t, _label(time_scale * time, x), cond)[..., : x.shape[-1]].astype(x.dtype)
        return x_t - sign * t * out

    return _denoiser(formula)


# ---------------------------------------------------------------------------------------------- closed forms


def gaussian(mean: ArrayLike, std: ArrayLike) -> Denoiser:
    """The exact denoiser of N(mean, std^2): D = (std^2 x + sigma^2 mean) / (std^2 + sigma^2), elementwise.

    Example:
        >>> gaussian(0.0, 1.0)(jnp.ones((1, 2)), 1.0)
        Array([[0.5, 0.5]], dtype=float32)
    """

    def formula(x: Array, sigma: Array, cond: Cond) -> Array:
        m, s = jnp.asarray(mean, x.dtype), jnp.asarray(std, x.dtype)
        return m + (x - m) * s**2 / (s**2 + sigma**2)

    return _denoiser(formula)


def gaussian_mixture(means: ArrayLike, stds: ArrayLike, weights: ArrayLike | None = None) -> Denoiser:
    """The exact denoiser of sum_k weights_k N(means_k, stds_k^2): the posterior mean over components.

    With cond {"label": i} it is the denoiser of component i alone (label k = the whole mixture), so a mixture can be
    guided like any class-conditional model.

    Args:
        means: [k ...].
        stds: a scalar, [k], or anything that broadcasts against means (diagonal covariances).
        weights: [k], normalised; equal when None.

    Returns:
        A denoiser.

    Raises:
        ValueError: a std or a weight is not positive, or their number is not k.

    Example:
        >>> denoise = gaussian_mixture(jnp.array([[-1.0], [1.0]]), 0.1)
        >>> denoise(jnp.array([[0.0]]), 1.0)  # as likely from either mode
        Array([[0.]], dtype=float32)
        >>> denoise(jnp.array([[0.0]]), 0.1, {"label": jnp.array([1])})
        Array([[0.5]], dtype=float32)
    """
    means, stds = np.asarray(means), np.asarray(stds)
    k, event = means.shape[0], means.shape[1:]
    if stds.shape == (k,):
        stds = stds.reshape(stds.shape + (1,) * len(event))
    stds = np.broadcast_to(stds, means.shape)
    weights = np.ones(k) if weights is None else np.asarray(weights)
    if weights.shape != (k,) or not ((weights > 0).all() and (stds > 0).all()):
        raise ValueError(f"a mixture of {k} components needs {k} positive weights and stds, got shape {weights.shape}")
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


def score(denoise: Denoiser) -> Denoiser:
    """The score of the noisy density, (D - x) / sigma^2 (Tweedie).

    Example:
        >>> score(gaussian(0.0, 1.0))(jnp.ones((1, 1)), 1.0)  # -x / (1 + sigma^2)
        Array([[-0.5]], dtype=float32)
    """

    def transformed(x: Array, sigma: Sigma, cond: Cond = None) -> Array:
        x = at_least_float32(x)
        return (denoise(x, sigma, cond) - x) / per_example(sigma, x) ** 2

    return transformed


def noise_prediction(denoise: Denoiser) -> Denoiser:
    """The predicted eps, (x - D) / sigma, which is also the slope dx/dsigma of the probability-flow ODE.

    Example:
        >>> noise_prediction(gaussian(0.0, 1.0))(jnp.ones((1, 1)), 1.0)
        Array([[0.5]], dtype=float32)
    """

    def transformed(x: Array, sigma: Sigma, cond: Cond = None) -> Array:
        x = at_least_float32(x)
        return (x - denoise(x, sigma, cond)) / per_example(sigma, x)

    return transformed


def velocity(denoise: Denoiser) -> Denoiser:
    """The rectified-flow velocity eps - x0 = (x - D) / sigma - D; the inverse of `flow`.

    Example:
        >>> velocity(gaussian(0.0, 1.0))(jnp.ones((1, 1)), 1.0)
        Array([[0.]], dtype=float32)
    """

    def transformed(x: Array, sigma: Sigma, cond: Cond = None) -> Array:
        x = at_least_float32(x)
        x0 = denoise(x, sigma, cond)
        return (x - x0) / per_example(sigma, x) - x0

    return transformed


def one_step(denoise: Denoiser, sigma_star: float, scale: float = 1.0) -> Callable[..., Array]:
    """A generator `g(z, cond=None) = D(scale sigma_star z, sigma_star, cond)` of unit Gaussian z.

    Example:
        >>> one_step(gaussian(0.0, 1.0), sigma_star=1.0)(jnp.ones((1, 1)))
        Array([[0.5]], dtype=float32)
    """
    check_sigma(sigma_star)
    return lambda z, cond=None: denoise(scale * sigma_star * z, sigma_star, cond)


def thresholded(denoise: Denoiser, percentile: float = 99.5, floor: float = 1.0) -> Denoiser:
    """Dynamic thresholding (Saharia et al. 2022): clip x0 to its own percentile s >= floor, then divide by s / floor.

    For pixels in [-1, 1] only; latents have no such range.

    Example:
        >>> thresholded(gaussian(0.0, 3.0), percentile=100)(jnp.array([[4.0, -2.0]]), 0.001)
        Array([[ 1. , -0.5]], dtype=float32)
    """
    if not (0 < percentile <= 100 and 0 < floor < np.inf):
        raise ValueError(f"percentile must be in (0, 100] and floor positive, got {percentile} and {floor}")

    def transformed(x: Array, sigma: Sigma, cond: Cond = None) -> Array:
        x0 = denoise(x, sigma, cond)
        axes = tuple(range(1, x0.ndim))
        s = jnp.maximum(jnp.percentile(jnp.abs(x0), percentile, axis=axes, keepdims=True), floor)
        return jnp.clip(x0, -s, s) * (floor / s)

    return transformed
