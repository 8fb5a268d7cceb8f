"""Noise tables of discrete-time models: alpha_bar[t] is the fraction of signal variance at timestep t."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from jaxdiff.errors import check_ratio


def linear_alpha_bar(steps: int = 1000, first: float = 1e-4, last: float = 2e-2) -> np.ndarray:
    """The DDPM table: betas linear in the timestep (DiT, ADM).

    Example:
        >>> linear_alpha_bar().shape
        (1000,)
    """
    return np.cumprod(1 - np.linspace(first, last, steps))


def sqrt_linear_alpha_bar(steps: int = 1000, first: float = 0.00085, last: float = 0.012) -> np.ndarray:
    """The latent-diffusion table: square roots of betas linear in the timestep (Stable Diffusion's values).

    Example:
        >>> round(float(sigma_table(sqrt_linear_alpha_bar())[-1]), 2)  # the highest noise level of SD
        14.61
    """
    return np.cumprod(1 - np.linspace(first**0.5, last**0.5, steps) ** 2)


def cosine_alpha_bar(steps: int = 1000, offset: float = 0.008, max_beta: float = 0.999) -> np.ndarray:
    """The improved-DDPM table: alpha_bar = cos^2 of a linear angle, betas capped at `max_beta`.

    Example:
        >>> bool(0.49 < cosine_alpha_bar()[499] < 0.51)  # half of the variance in the middle
        True
    """
    curve = np.cos((np.linspace(0, 1, steps + 1) + offset) / (1 + offset) * np.pi / 2) ** 2
    return np.cumprod(1 - np.minimum(1 - curve[1:] / curve[:-1], max_beta))


SCHEDULES: dict[str, Callable[[], np.ndarray]] = {
    "linear": linear_alpha_bar,
    "sqrt_linear": sqrt_linear_alpha_bar,
    "cosine": cosine_alpha_bar,
}


def rescaled_alpha_bar(alpha_bar: ArrayLike, ratio: float) -> np.ndarray:
    """The table for images `ratio` times as large: sigma' = ratio sigma, so a' = a / (ratio^2 + a (1 - ratio^2)).

    A patch of the small image covers ratio^2 pixels of the large one, over which noise averages out: with
    SNR' = SNR / ratio^2 a timestep means the same uncertainty at both sizes (Berrada et al. 2024).

    Example:
        >>> table = linear_alpha_bar()
        >>> bool(np.allclose(sigma_table(rescaled_alpha_bar(table, 2)), 2 * sigma_table(table)))
        True
    """
    check_ratio(ratio)
    table = np.asarray(alpha_bar, np.float64)
    return table / (ratio**2 + table * (1 - ratio**2))


def sigma_table(alpha_bar: ArrayLike) -> np.ndarray:
    """The noise levels sqrt((1 - alpha_bar) / alpha_bar) of a discrete table, ascending, float64.

    Raises:
        ValueError: the table is not strictly decreasing within (0, 1).

    Example:
        >>> sigma_table([0.5, 0.2])
        array([1., 2.])
    """
    table = np.asarray(alpha_bar, np.float64)
    if table.ndim != 1 or len(table) < 2 or not (np.diff(table) < 0).all() or not (table[-1] > 0 and table[0] < 1):
        raise ValueError(
            f"alpha_bar must be a 1-D table, strictly decreasing within (0, 1), got shape {table.shape}"
            + (f" from {table.flat[0]:.4g} to {table.flat[-1]:.4g}" if table.size else "")
            + "; pass the cumulative product of 1 - beta, for example schedules.linear_alpha_bar()"
        )
    return np.sqrt((1 - table) / table)
