"""Solving the probability-flow ODE: one scan that serves every solver."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

from jaxdiff.denoisers import Cond, Denoiser, Sigma, at_least_float32, check_cond, per_example
from jaxdiff.errors import check_sigma, concrete
from jaxdiff.solvers.steps import Solver, make
from jaxdiff.trees import AnyArray


def solve(
    denoise: Denoiser,
    x: Float[Array, "b ..."],
    sigmas: ArrayLike,
    solver: str | Solver = "heun",
    cond: Cond = None,
    afs: bool = False,
    key: Array | None = None,
    trajectory: bool | Sequence[int] = False,
    final_denoise: bool = False,
) -> Float[Array, ...]:
    """Carry x from noise level sigmas[0] to sigmas[-1]; x must already be scaled by sigmas[0].

    Args:
        denoise: a denoiser.
        x: `sigmas[0] * noise`, [b ...].
        sigmas: descending noise levels, such as `solvers.grid(18, 0.002, 80)`; may be traced.
        solver: a name in `solvers.SOLVERS`, or a value with options such as `solvers.ipndm(order=3)`.
        cond: passed on to the denoiser.
        afs: the first evaluation is analytic, at no cost (Dockhorn et al. 2022): d = x / sqrt(1 + sigmas[0]^2).
        key: for stochastic solvers; an array of one key per example makes an image independent of its batch.
        trajectory: True: all len(sigmas) states along a new leading axis, the start included. A sequence of indices:
            only those states, and only they are held in memory.
        final_denoise: end with x0 = D(x, sigmas[-1]), the Euler step to sigma = 0, one more evaluation; one timestamp
            is enough.

    Returns:
        The last state, of x's shape; with `trajectory` the states [n b ...].

    Raises:
        ValueError: sigmas do not descend, end in 0 or are too few; a stochastic solver has no key.

    Example:
        >>> from jaxdiff import denoisers, solvers
        >>> sigmas = solvers.grid(18, sigma_min=0.002, sigma_max=80)
        >>> noise = jax.random.normal(jax.random.key(0), (1000, 2))
        >>> x0 = solve(denoisers.gaussian(3.0, 0.5), sigmas[0] * noise, sigmas, "heun", final_denoise=True)
        >>> bool(abs(x0.mean() - 3) < 0.05 and abs(x0.std() - 0.5) < 0.05)
        True
    """
    method = make(solver) if isinstance(solver, str) else solver
    grid, xp = _check_grid(sigmas, 1 if final_denoise and not afs else 2)
    check_cond(cond)
    keep = _check_keep(trajectory, len(grid), final_denoise)
    x = at_least_float32(x)
    if len(grid) == 1:
        return denoise(x, jnp.asarray(grid[0], x.dtype), cond)
    if method.stochastic and key is None:
        name = solver if isinstance(solver, str) else "this solver"
        raise ValueError(f"{name} draws noise: pass key=jax.random.key(seed)")
    rows = {name: jnp.asarray(column, x.dtype) for name, column in method.table(grid, xp).items()}
    keys = None if key is None else _step_keys(key, len(grid) - 1, x.shape[0])

    slots = np.full(len(grid), len(keep), np.int32)  # where a state goes in `kept`; past the end = nowhere
    slots[list(keep)] = np.arange(len(keep))
    kept = None
    if keep:
        kept = jnp.zeros((len(keep), *x.shape), x.dtype).at[slots[0]].set(x, mode="drop")

    def advance(first: Denoiser, carry: tuple, i: Array | int) -> tuple:
        x, past, kept = carry
        row = jax.tree.map(lambda column: column[i], rows)
        x, past = method.step(first, denoise, cond, x, past, row, None if keys is None else keys[i])
        if keep:
            kept = kept.at[jnp.asarray(slots)[i + 1]].set(x, mode="drop")
        return x, past, kept

    carry = (x, (jnp.zeros_like(x),) * method.history, kept)
    if afs:
        carry = advance(analytic_first_step, carry, 0)
    indices = jnp.arange(int(afs), len(grid) - 1)
    (x, _, kept), _ = jax.lax.scan(lambda carry, i: (advance(denoise, carry, i), None), carry, indices)
    if kept is not None:
        return kept
    return denoise(x, jnp.asarray(grid[-1], x.dtype), cond) if final_denoise else x


def analytic_first_step(x: Array, sigma: Sigma, cond: Cond = None) -> Array:
    """The denoiser whose slope is x / sqrt(1 + sigma^2): exact for unit-variance data as sigma grows.

    Example:
        >>> bool(abs(analytic_first_step(jnp.ones((1, 1)) * 80, 80.0)[0, 0]) < 0.01)
        True
    """
    sigma = per_example(sigma, x)
    return x * (1 - sigma / jnp.sqrt(1 + sigma**2))


def _check_grid(sigmas: ArrayLike, least: int) -> tuple[AnyArray, ModuleType]:
    """The grid in float64 NumPy unless it is traced, and the array library to use on it."""
    seen = concrete(sigmas)
    if seen is None:
        assert isinstance(sigmas, jax.Array)
        if sigmas.ndim != 1 or len(sigmas) < least:
            raise ValueError(f"sigmas must be 1-D with at least {least} timestamps, got shape {sigmas.shape}")
        return sigmas, jnp
    if seen.ndim != 1 or len(seen) < least:
        raise ValueError(
            f"sigmas must be 1-D with at least {least} timestamps, got shape {seen.shape}; see solvers.grid"
        )
    if seen[-1] == 0 and (seen[:-1] > 0).all():
        raise ValueError(
            "sigmas ends in 0: leave the zero out and pass final_denoise=True, which ends with x0 = D(x, sigmas[-1])"
        )
    check_sigma(seen)
    rises = np.flatnonzero(np.diff(seen) >= 0)
    if len(rises):
        i = int(rises[0])
        raise ValueError(
            f"sigmas must descend strictly, but sigmas[{i}]={seen[i]:g} is followed by {seen[i + 1]:g}; "
            "solvers.grid gives descending grids, or reverse yours with sigmas[::-1]"
        )
    return seen.astype(np.float64), np


def _check_keep(trajectory: bool | Sequence[int], timestamps: int, final_denoise: bool) -> tuple[int, ...]:
    """The state indices to return, ascending; empty for the last state alone."""
    if trajectory is False:
        return ()
    if final_denoise:
        raise ValueError(
            "final_denoise ends outside the grid, so it cannot be combined with trajectory; pass one of them"
        )
    keep = tuple(range(timestamps)) if trajectory is True else tuple(int(i) for i in trajectory)
    if not keep or list(keep) != sorted(set(keep)) or not 0 <= keep[0] <= keep[-1] < timestamps:
        raise ValueError(f"trajectory must be True or ascending indices within 0..{timestamps - 1}, got {trajectory}")
    return keep


def _step_keys(key: Array, steps: int, examples: int) -> Array:
    """One key per step, or one per step and example if `key` is an array of keys."""
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    if key.shape not in ((), (examples,)):
        raise ValueError(f"key must be one key or one per example, shape ({examples},), got shape {key.shape}")
    fold = jax.random.fold_in if key.ndim == 0 else jax.vmap(jax.random.fold_in, (0, None))
    return jax.vmap(lambda i: fold(key, i))(jnp.arange(steps))
