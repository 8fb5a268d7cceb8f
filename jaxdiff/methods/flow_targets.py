"""Targets of flow maps: noise levels, the total derivative along a trajectory, what rules compare G with.

    x = x0 + sigma eps;   D = x0 (data), the teacher's D(x, sigma), or with guidance w and mix k from data alone
                          D = w x0 + k G(x, sigma, sigma, cond) + (1 - w - k) G(x, sigma, sigma, null)

By ln sigma the derivative along the trajectory has no factors that grow: x moves along the line through D,

    dG/dln sigma = J_x G (x - D) + sigma dG/dsigma            jvp: one forward-mode product
                 = (G(x+, sigma+) - G(x-, sigma-)) / 2h       difference: sigma+- = e^+-h sigma, x+- = D + e^+-h (x - D)

MeanFlow's u_tgt = v - (t - r) du/dt with G = z - t u, t = sigma/(1 + sigma), r = tau/(1 + tau) is

    G_tgt = (r/t) D + (1 - r/t) G - (t - r) dG/dt
    (t - r) dG/dt = (sigma - tau)(1 + sigma)/(sigma (1 + tau)) dG/dln sigma

The loss is on the velocity, u - u_tgt = (G_tgt - G)/t, with the adaptive weight 1/(|.|^2 + c)^p, p and c given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import Array
from jax.typing import ArrayLike

from jaxdiff import flow_maps
from jaxdiff.denoisers import Denoiser, per_example
from jaxdiff.errors import choose
from jaxdiff.flow_maps import FlowMap
from jaxdiff.methods.method import Examples, Metrics, Parts
from jaxdiff.models import attention
from jaxdiff.trees import Params

Levels = Callable[[Array, int, Array], tuple[dict[str, Array], Metrics]]  # (key, n, step) -> levels [n] by name
DERIVATIVES = ("jvp", "difference")


@dataclass(frozen=True)
class FlowMapOptions:
    """Options of every method that learns a flow map."""

    distil: bool = False  # distil a teacher; False: train from data alone
    guidance: float = 1.0  # (-inf, inf) guidance scale that the student learns
    sigma_min: float = 0.002  # (0, inf) lowest noise level of training
    sigma_max: float = 80.0  # (0, inf) highest noise level of training, at or above sample.sigma_max
    mean: float = -0.6  # (-inf, inf) of ln sigma
    std: float = 1.6  # [0, inf) of ln sigma
    target_decay: float = 0.0  # [0, 1) decay of an averaged target network; 0: the online network is the target

    def __post_init__(self) -> None:
        if not 0 < self.sigma_min < self.sigma_max:
            raise ValueError(f"training needs 0 < sigma_min < sigma_max, got {self.sigma_min} and {self.sigma_max}")
        if not 0 <= self.target_decay < 1:
            raise ValueError(f"target_decay must be in [0, 1), 0 for no average, got {self.target_decay}")


@dataclass(frozen=True)
class AnchoredOptions(FlowMapOptions):
    """Options of methods that also train the diagonal, which guides the student where there is no teacher."""

    guidance_mix: float = 0.0  # [0, 1) without a teacher: share k of the student's D in the guided one; scale w/(1 - k)
    cond_dropout: float = 0.0  # [0, 1) without a teacher: probability of dropping the class or text of an example
    loss_power: float = 0.75  # [0, inf) p of the adaptive weight; 0: squared error
    loss_offset: float = 1e-3  # [0, inf) c of the adaptive weight

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 <= self.cond_dropout < 1 and 0 <= self.guidance_mix < 1):
            raise ValueError(
                f"cond_dropout and guidance_mix must be in [0, 1), got {self.cond_dropout} and {self.guidance_mix}"
            )
        if self.distil and (self.cond_dropout or self.guidance_mix):
            raise ValueError("cond_dropout and guidance_mix are for training without a teacher; leave them at 0")


@dataclass(frozen=True)
class PairOptions(AnchoredOptions):
    """Options of methods that draw tau below sigma."""

    tau_mean: float = -4.0  # (-inf, inf) of ln tau
    tau_std: float = 1.6  # [0, inf) of ln tau
    order: str = "min"  # of the two draws: min (tau is lowered to sigma), sort (sigma is the larger one)
    diagonal: float = 0.25  # [0, 1] share of the batch with tau = sigma

    def __post_init__(self) -> None:
        super().__post_init__()
        choose(self.order, ("min", "sort"), "order of sigma and tau")
        if not 0 <= self.diagonal <= 1:
            raise ValueError(f"diagonal, the share with tau = sigma, must be in [0, 1], got {self.diagonal}")


# ------------------------------------------------------------------------------------------ shared by the rules


class Networks(NamedTuple):
    """What a rule computes its loss from."""

    student: FlowMap
    target: FlowMap  # the same, or that of averaged parameters; a rule stops its gradient
    anchor: Callable[[Array, Examples], Array]  # (x, examples) -> D, without gradient
    teacher: Denoiser | None  # guided
    params: Mapping[str, Params]  # all that are trained, by name
    step: Array


Rule = Callable[[Networks, Examples], tuple[Array, Metrics]]  # -> loss, metrics


def draw_levels(options: FlowMapOptions) -> Levels:
    """sigma alone, ln sigma ~ N(mean, std^2), clipped."""

    def draw(key: Array, n: int, step: Array) -> tuple[dict[str, Array], Metrics]:
        return {"sigma": _lognormal(key, n, options.mean, options.std, options)}, {}

    return draw


def draw_pairs(options: PairOptions) -> Levels:
    """sigma and tau <= sigma: two draws in the order of the options, then tau = sigma for a share of the batch."""

    def draw(key: Array, n: int, step: Array) -> tuple[dict[str, Array], Metrics]:
        first, second, third = jax.random.split(key, 3)
        sigma = _lognormal(first, n, options.mean, options.std, options)
        tau = jnp.exp(options.tau_mean + options.tau_std * jax.random.normal(second, (n,)))
        if options.order == "sort":
            sigma, tau = jnp.minimum(jnp.maximum(sigma, tau), options.sigma_max), jnp.minimum(sigma, tau)
        same = jax.random.bernoulli(third, options.diagonal, (n,))
        return {"sigma": sigma, "tau": jnp.where(same, sigma, jnp.minimum(tau, sigma))}, {}

    return draw


def _lognormal(key: Array, n: int, mean: float, std: float, options: FlowMapOptions) -> Array:
    return jnp.clip(jnp.exp(mean + std * jax.random.normal(key, (n,))), options.sigma_min, options.sigma_max)


def noisy(examples: Examples) -> Array:
    """x0 + sigma eps."""
    return examples["x0"] + per_example(examples["sigma"], examples["x0"]) * examples["eps"]


def total_derivative(
    function: Callable[[Array, Array], Array], x: Array, sigma: Array, clean: Array, how: str = "jvp", h: float = 5e-3
) -> tuple[Array, Array]:
    """`function(x, sigma)` and its derivative by ln sigma along the trajectory, on which x leaves `clean`."""
    if choose(how, DERIVATIVES, "derivative") == "jvp":
        with attention.forward_mode():
            return jax.jvp(function, (x, sigma), (x - clean, sigma))

    def at(offset: float) -> Array:
        factor = float(np.exp(offset))
        return function(clean + factor * (x - clean), factor * sigma)

    return function(x, sigma), (at(h) - at(-h)) / (2 * h)


def tangent_target(
    networks: Networks, x: Array, examples: Examples, tau: Array, clean: Array, how: str, share: ArrayLike = 1.0
) -> tuple[Array, Array, Metrics]:
    """G, its target G_tgt and metrics; `share` multiplies the derivative, which may be warmed up."""
    sigma, cond = examples["sigma"], examples.get("cond")
    base, slope = total_derivative(lambda x, sigma: networks.target(x, sigma, tau, cond), x, sigma, clean, how)
    made = base if networks.target is networks.student else networks.student(x, sigma, tau, cond)
    base, slope = jax.lax.stop_gradient((base, slope))
    ratio = per_example(tau * (1 + sigma) / (sigma * (1 + tau)), x)
    reach = per_example((sigma - tau) * (1 + sigma) / (sigma * (1 + tau)), x)
    change = reach * slope
    wanted = ratio * clean + (1 - ratio) * base - jnp.asarray(share, x.dtype) * change
    return made, wanted, {"tangent": jnp.sqrt(jnp.square(change).mean())}


def composed(first: Array, second: Array, sigma: Array, mid: Array, tau: Array) -> Array:
    """G of two jumps: `first` from sigma to mid, then `second` from mid to tau. On the diagonal it is `first`.

    X = (tau/sigma) x + (1 - tau/sigma) (a first + (1 - a) second),  a = tau (sigma - mid) / (mid (sigma - tau)).
    """
    apart = sigma - tau
    share = jnp.where(apart > 0, tau * (sigma - mid) / (mid * jnp.where(apart > 0, apart, 1.0)), 1.0)
    share = per_example(share, first)
    return share * first + (1 - share) * second


def velocity_loss(made: Array, wanted: Array, sigma: Array, power: float, offset: float) -> tuple[Array, Metrics]:
    """|u - u_tgt|^2 (summed over pixels) with its adaptive weight, per example, and the mean error per pixel."""
    difference = (made - wanted) * per_example(1 + 1 / sigma, made)
    squares = jnp.square(difference).reshape(len(made), -1)
    errors = squares.sum(1)
    weight = jax.lax.stop_gradient(errors + offset) ** -power
    return errors * weight, {"error": squares.mean()}


def warmed_up(step: Array, steps: int) -> Array | float:
    """The share of a derivative at a step: it grows to 1 over `steps`."""
    return jnp.minimum(step.astype(jnp.float32) / steps, 1.0) if steps else 1.0


def check_derivative(how: str, model: nn.Module) -> None:
    """Forward mode is known to the network."""
    choose(how, DERIVATIVES, "derivative")
    if how == "jvp" and getattr(model, "loop", False):
        raise ValueError(
            "derivative='jvp' needs forward mode, which convolutions in loop form (loop=True) do not have; "
            "set derivative='difference' or loop=False"
        )


def check_tau(name: str, parts: Parts) -> None:
    """The network takes tau."""
    if flow_maps.TAU not in parts.cond:
        raise ValueError(
            f"{name} needs a network that takes tau: set model.fields.scalars=('tau',) "
            f"({type(parts.model).__name__}(scalars=('tau',)))"
        )
