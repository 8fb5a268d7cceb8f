"""How training samples noise levels, and how it weights the loss at each.

A level is sigma in x = x0 + sigma eps; a weight multiplies |D - x0|^2. Published schedules are distributions of sigma:

    lognormal     ln sigma ~ N(mean, std^2)                        EDM: (-1.2, 1.2)
    logit_normal  logit t ~ N(mean, std^2), t = sigma/(1+sigma)    SD3; the same, since logit t = ln sigma
    uniform       t ~ U(0, 1), sigma = t/(1-t)                     rectified flow
    cosine        t ~ U(0, 1), sigma = tan(pi t / 2)               improved DDPM
    polynomial    sigma^(1/rho) ~ U                                the levels of EDM's sampling grid
    discrete      uniform over a table of levels                   DDPM
    shift r       sigma -> r sigma                                 a resolution r times larger

and every published weight a function of it, with SNR = 1/sigma^2:

    edm (sigma^2 + s^2)/(sigma s)^2     eps 1/sigma^2     x0 1     flow (1 + 1/sigma)^2, the error of eps - x0
    min_snr min(SNR, gamma)             sigmoid SNR sigmoid(bias + 2 ln sigma)
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

from jaxdiff.errors import check_ratio, pick

SigmaSampler = Callable[[Array, int], Float[Array, " n"]]  # (key, n) -> n noise levels
LossWeight = Callable[[Array], Array]


def lognormal(mean: float = -1.2, std: float = 1.2) -> SigmaSampler:
    return lambda key, n: jnp.exp(mean + std * jax.random.normal(key, (n,)))


def uniform(sigma_min: float = 1e-3, sigma_max: float = 1e3) -> SigmaSampler:
    return _by_time(lambda t: t / (1 - t), lambda s: s / (1 + s), sigma_min, sigma_max)


def cosine(sigma_min: float = 1e-3, sigma_max: float = 1e3) -> SigmaSampler:
    return _by_time(lambda t: jnp.tan(jnp.pi / 2 * t), lambda s: 2 / np.pi * np.arctan(s), sigma_min, sigma_max)


def polynomial(sigma_min: float = 0.002, sigma_max: float = 80.0, rho: float = 7.0) -> SigmaSampler:
    return _by_time(lambda t: t**rho, lambda s: s ** (1 / rho), sigma_min, sigma_max)


def discrete(table: ArrayLike) -> SigmaSampler:
    """Uniform over the levels of a table, `schedules.sigma_table(alpha_bar)` for a DDPM."""
    levels = np.asarray(table, np.float32)
    if levels.ndim != 1 or not len(levels) or (levels <= 0).any():
        raise ValueError(f"discrete levels need a 1-D table of positive sigmas, got shape {levels.shape}")
    return lambda key, n: jnp.asarray(levels)[jax.random.randint(key, (n,), 0, len(levels))]


def shifted(levels: SigmaSampler, ratio: float) -> SigmaSampler:
    """The same levels for images `ratio` times larger: sigma -> ratio sigma."""
    check_ratio(ratio)
    return lambda key, n: ratio * levels(key, n)


def at_least(levels: SigmaSampler, sigma_min: float) -> SigmaSampler:
    """The same levels, those below `sigma_min` raised to it."""
    return lambda key, n: jnp.maximum(levels(key, n), sigma_min)


def uncovered(levels: SigmaSampler, by: SigmaSampler, share: float = 0.01, n: int = 4096) -> tuple[float, float, float]:
    """How much of `levels` lies outside the range that holds all but `share` of `by`, and that range."""
    low, high = np.quantile(by(jax.random.key(0), n), (share / 2, 1 - share / 2))
    drawn = np.asarray(levels(jax.random.key(1), n))
    return float(((drawn < low) | (drawn > high)).mean()), float(low), float(high)


def _by_time(sigma: Callable, time: Callable, sigma_min: float, sigma_max: float) -> SigmaSampler:
    if not 0 < sigma_min < sigma_max:
        raise ValueError(f"levels need 0 < sigma_min < sigma_max, got {sigma_min} and {sigma_max}")
    low, high = float(time(sigma_min)), float(time(sigma_max))
    return lambda key, n: sigma(jax.random.uniform(key, (n,), minval=low, maxval=high))


LEVELS: dict[str, Callable[..., SigmaSampler]] = {
    "lognormal": lognormal,
    "logit_normal": lognormal,
    "uniform": uniform,
    "cosine": cosine,
    "polynomial": polynomial,
    "discrete": discrete,
}


def edm_weight(sigma_data: float = 0.5) -> LossWeight:
    return lambda sigma: (sigma**2 + sigma_data**2) / (sigma * sigma_data) ** 2


def min_snr_weight(gamma: float = 5.0) -> LossWeight:
    """Min-SNR for an eps network (Hang et al. 2023), written on the x0 error."""
    return lambda sigma: jnp.minimum(1 / sigma**2, gamma)


def sigmoid_weight(bias: float = 2.0) -> LossWeight:
    """sigmoid(bias - logSNR) on the eps error (Kingma & Gao 2023), written on the x0 error."""
    return lambda sigma: jax.nn.sigmoid(bias + 2 * jnp.log(sigma)) / sigma**2


LOSS_WEIGHTS: dict[str, Callable[..., LossWeight]] = {
    "edm": edm_weight,
    "min_snr": min_snr_weight,
    "sigmoid": sigmoid_weight,
    "flow": lambda: lambda sigma: (1 + 1 / sigma) ** 2,
    "eps": lambda: lambda sigma: 1 / sigma**2,
    "x0": lambda: jnp.ones_like,
}


def make_levels(name: str, shift: float = 1.0, **options: object) -> SigmaSampler:
    """Levels by their name in LEVELS, shifted for the resolution."""
    levels = pick(LEVELS, name, "noise levels")(**options)
    return levels if shift == 1.0 else shifted(levels, shift)


def make_weight(name: str, **options: object) -> LossWeight:
    """A loss weight by its name in LOSS_WEIGHTS."""
    build = pick(LOSS_WEIGHTS, name, "loss weight")
    try:
        return build(**options)
    except TypeError as error:
        raise ValueError(f"loss weight {name!r} does not take {options}: {error}") from None


def loss_weight(weight: str | LossWeight, convention: object = None, **options: object) -> LossWeight:
    """A weight by name, EDM's with the convention's sigma_data; a function of sigma is returned as it is."""
    if callable(weight):
        return weight
    if weight == "edm" and hasattr(convention, "sigma_data"):
        options = {"sigma_data": convention.sigma_data, **options}
    return make_weight(weight, **options)
