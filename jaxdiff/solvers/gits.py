"""GITS (Chen et al., ICML 2024): choose the n best timestamps of a fine grid, without training.

A teacher runs the fine grid t_0 > ... > t_N on a batch of noise. A jump i -> j is one Euler step along the
teacher's slope d_i; its cost is how much further from the chord x_0 - x_N it lands than the teacher's x_j:

    cost(i, j) = E |P(x_i + (t_j - t_i) d_i)| - E |P x_j|,       P = the projection away from the chord.

Dynamic programming finds the path of n - 1 jumps: V_1(j) = cost(j, N), V_k(j) = min_i cost(j, i) + discount V_{k-1}(i).
|P(x + w d)|^2 is a quadratic in w, so three inner products per state give the cost of all jumps. The cost is signed and
assumes that trajectories bend one way, as they do in image space; in few dimensions it can choose poorly.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

from jaxdiff.denoisers import Cond, Denoiser, noise_prediction
from jaxdiff.solvers.sample import solve
from jaxdiff.solvers.steps import Solver


def gits(
    denoise: Denoiser,
    x: Float[Array, "b ..."],
    sigmas: ArrayLike,
    n: int,
    solver: str | Solver = "ipndm",
    cond: Cond = None,
    discount: float = 1.15,
) -> np.ndarray:
    """n of the timestamps in the fine grid `sigmas`, its two ends included, chosen by dynamic programming.

    Args:
        denoise: a denoiser.
        x: noise scaled by sigmas[0], [b ...]; some dozens are enough.
        sigmas: the fine grid to choose from.
        n: number of timestamps.
        solver: with which the fine trajectories are solved.
        cond: passed on to the denoiser.
        discount: of later errors, per step.

    Returns:
        float64 [n], descending.
    """
    sigmas = np.asarray(sigmas, np.float64)
    if sigmas.ndim != 1 or not 2 <= n <= len(sigmas):
        raise ValueError(f"gits needs 2 <= n <= the fine grid's {sigmas.size} timestamps, got n={n}")
    slope = noise_prediction(denoise)

    @jax.jit
    def teach(x: Array, cond: Cond) -> tuple[Array, Array]:
        states = solve(denoise, x, sigmas, solver, cond, trajectory=True)
        levels = jnp.asarray(sigmas, states.dtype)
        return states, jax.lax.map(lambda pair: slope(pair[0], pair[1], cond), (states, levels))

    states, slopes = (np.asarray(a, np.float64) for a in teach(x, cond))
    return sigmas[best_path(jump_costs(states, slopes, sigmas), n, discount)]


def jump_costs(states: np.ndarray, slopes: np.ndarray, sigmas: np.ndarray) -> np.ndarray:
    """cost[i, j] of the Euler jump i -> j, averaged over the batch; infinite where j <= i."""
    states, slopes = (a.reshape(*a.shape[:2], -1) for a in (states, slopes))  # [timestamps, b, everything]
    chord = states[0] - states[-1]
    chord /= np.linalg.norm(chord, axis=-1, keepdims=True)
    away = lambda a: a - (a * chord).sum(-1, keepdims=True) * chord  # noqa: E731
    offset, slope = away(states - states[-1]), away(slopes)
    xx, xd, dd = ((a * b).sum(-1) for a, b in ((offset, offset), (offset, slope), (slope, slope)))
    w = (sigmas[None, :] - sigmas[:, None])[..., None]
    landed = np.sqrt(np.maximum(xx[:, None] + 2 * w * xd[:, None] + w**2 * dd[:, None], 0)).mean(-1)
    costs = landed - np.sqrt(xx).mean(-1)[None, :]
    return np.where(w[..., 0] < 0, costs, np.inf)


def best_path(costs: np.ndarray, n: int, discount: float) -> list[int]:
    """Indices of the cheapest path of n - 1 jumps from the first timestamp to the last."""
    value = costs[:, -1]
    choices = []
    for _ in range(n - 2):
        total = costs + discount * value[None, :]
        choices.append(total.argmin(1))
        value = total.min(1)
    path = [0]
    for choice in reversed(choices):
        path.append(int(choice[path[-1]]))
    return [*path, len(costs) - 1]
