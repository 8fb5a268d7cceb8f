"""Flow maps: functions `G(x, sigma, tau, cond=None) -> x0` that solve the probability-flow ODE from sigma to tau.

    X(x, sigma -> tau) = (tau/sigma) x + (1 - tau/sigma) G(x, sigma, tau)             a jump

G(x, sigma, sigma) = D(x, sigma): the diagonal is an ordinary denoiser, and a denoiser whose value is used for every tau
makes Euler steps. G(x, sigma, 0) is the end of the trajectory, the function of a consistency model. Along the ODE,
dx/dsigma = (x - D)/sigma, X does not change, so that

    (tau/sigma) (G - D) + (sigma - tau) dG/dsigma = 0                                 dG/dsigma total

In flow time, z = (1 - t) x, t = sigma/(1 + sigma), r = tau/(1 + tau), the average velocity of MeanFlow is that of G:

    u(z, t, r) = (x - G)/sigma - G = (z - G)/t,      z_r = z_t - (t - r) u,      u = v - (t - r) du/dt

A network takes tau as the scalar condition `tau` = 1000 tau/(1 + tau), whatever its convention (EDM's label of tau = 0
would be -inf): model.fields.scalars = ("tau",).
Sources: Song et al. 2023 (tau = 0), Kim et al. 2024 (CTM), Boffi et al. 2024, Frans et al. 2025 (shortcut), Geng et al.
2025 (MeanFlow).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

from jaxdiff.conditions import Cond
from jaxdiff.denoisers import Denoiser, Sigma, at_least_float32, per_example
from jaxdiff.errors import check_sigma

TAU = "tau"  # the condition's name
AverageVelocity = Callable[..., Array]  # u(z, t, r, cond=None)


@runtime_checkable
class FlowMap(Protocol):
    """The contract of flow maps; sigma and tau are scalars or one value per example, 0 <= tau <= sigma."""

    def __call__(
        self, x: Float[Array, "b ..."], sigma: Sigma, tau: Sigma, cond: Cond = None
    ) -> Float[Array, "b ..."]: ...


def tau_label(tau: Sigma) -> Array:
    """How a network is given tau: 1000 tau/(1 + tau)."""
    tau = jnp.asarray(tau)
    return 1000 * tau / (1 + tau)


# ------------------------------------------------------------------------------------------ denoisers and flow maps


def of_network(denoise: Denoiser) -> FlowMap:
    """The flow map of a denoiser whose network takes the condition `tau`."""

    def flow_map(x: Array, sigma: Sigma, tau: Sigma, cond: Cond = None) -> Array:
        label = jnp.broadcast_to(tau_label(tau), x.shape[:1])
        return denoise(x, sigma, {**(cond or {}), TAU: label})

    return flow_map


def of_denoiser(denoise: Denoiser) -> FlowMap:
    """A denoiser as a flow map that ignores tau: its jumps are Euler steps."""
    return lambda x, sigma, tau, cond=None: denoise(x, sigma, cond)


def diagonal(flow_map: FlowMap) -> Denoiser:
    """The denoiser G(x, sigma, sigma)."""
    return lambda x, sigma, cond=None: flow_map(x, sigma, sigma, cond)


def ending(flow_map: FlowMap, tau: float = 0.0) -> Denoiser:
    """The consistency function: the jump to the end of the trajectory, at tau, as a function of (x, sigma, cond)."""

    def function(x: Array, sigma: Sigma, cond: Cond = None) -> Array:
        return jump(flow_map, x, sigma, tau, cond) if tau else flow_map(x, sigma, 0.0, cond)

    return function


def on_diagonal(signals: Mapping[str, Any], cond: Cond, sigma: Sigma, examples: int) -> Cond:
    """`cond` for a network with these signals as a denoiser: with tau = sigma if it takes tau and none is given."""
    if TAU not in signals or TAU in (cond or {}):
        return cond
    return {**(cond or {}), TAU: jnp.broadcast_to(tau_label(sigma), (examples,))}


# ------------------------------------------------------------------------------------------ jumps


def moved(x: Array, clean: Array, sigma: Sigma, tau: Sigma) -> Array:
    """(tau/sigma) x + (1 - tau/sigma) clean: along the line through `clean` from sigma to tau."""
    ratio = per_example(tau, x) / per_example(sigma, x)
    return ratio * x + (1 - ratio) * clean


def jump(flow_map: FlowMap, x: Float[Array, "b ..."], sigma: Sigma, tau: Sigma, cond: Cond = None) -> Array:
    """X(x, sigma -> tau)."""
    check_sigma(sigma)
    x = at_least_float32(x)
    return moved(x, flow_map(x, sigma, tau, cond), sigma, tau)


def sample(
    flow_map: FlowMap, x: Float[Array, "b ..."], sigmas: ArrayLike | Sequence[float], cond: Cond = None
) -> Array:
    """Carry x from noise level sigmas[0] to sigmas[-1], which may be 0, one evaluation per jump."""
    levels = _check_levels(sigmas)
    x = at_least_float32(x)
    if len(levels) == 2:
        high, low = jnp.asarray(levels, x.dtype)
        return jump(flow_map, x, high, low, cond)
    pairs = jnp.asarray(np.stack([levels[:-1], levels[1:]], axis=1), x.dtype)
    return jax.lax.scan(lambda x, pair: (jump(flow_map, x, pair[0], pair[1], cond), None), x, pairs)[0]


def _check_levels(sigmas: ArrayLike | Sequence[float]) -> np.ndarray:
    if isinstance(sigmas, jax.core.Tracer):
        raise ValueError("the noise levels of jumps must be known when the program is traced")
    levels = np.asarray(sigmas, np.float64)
    if levels.ndim != 1 or len(levels) < 2 or (np.diff(levels) >= 0).any() or levels[-1] < 0:
        raise ValueError(f"jumps need at least 2 strictly descending noise levels that end at 0 or above, got {levels}")
    return levels


# ------------------------------------------------------------------------------------------ average velocity


def average_velocity(flow_map: FlowMap) -> AverageVelocity:
    """MeanFlow's u(z, t, r, cond) of a flow map, for 0 <= r <= t < 1."""

    def velocity(z: Array, t: Sigma, r: Sigma, cond: Cond = None) -> Array:
        t, r = jnp.asarray(t, z.dtype), jnp.asarray(r, z.dtype)
        clean = flow_map(z / per_example(1 - t, z), t / (1 - t), r / (1 - r), cond)
        return (z - clean) / per_example(t, z)

    return velocity


def of_average_velocity(velocity: AverageVelocity) -> FlowMap:
    """The flow map of an average velocity u(z, t, r, cond): G = z - t u."""

    def flow_map(x: Array, sigma: Sigma, tau: Sigma, cond: Cond = None) -> Array:
        sigma, tau = jnp.asarray(sigma, x.dtype), jnp.asarray(tau, x.dtype)
        z, t = x / per_example(1 + sigma, x), sigma / (1 + sigma)
        return z - per_example(t, x) * velocity(z, t, tau / (1 + tau), cond)

    return flow_map


# ------------------------------------------------------------------------------------------ closed form


def gaussian(mean: ArrayLike, std: ArrayLike) -> FlowMap:
    """The exact flow map of data N(mean, std^2), elementwise.

    X = m + rho (x - m), rho^2 = (s^2 + tau^2)/(s^2 + sigma^2), so
    G = m + (sigma rho - tau)/(sigma - tau) (x - m)
      = m + s^2 (sigma + tau)/((s^2 + sigma^2)(sigma rho + tau)) (x - m), which has no 0/0 on the diagonal.
    """

    def flow_map(x: Array, sigma: Sigma, tau: Sigma, cond: Cond = None) -> Array:
        m, s = jnp.asarray(mean, x.dtype), jnp.asarray(std, x.dtype)
        high, low = per_example(sigma, x), per_example(tau, x)
        total = s**2 + high**2
        rho = jnp.sqrt((s**2 + low**2) / total)
        return m + s**2 * (high + low) / (total * (high * rho + low)) * (x - m)

    return flow_map
