"""Consistency models: one evaluation maps any point of a trajectory to its end (Song et al. 2023).

    f(x, sigma) = x + (sigma_min - sigma) (x - D(x, sigma)) / sigma,      f(x, sigma_min) = x
    x_high = x0 + high eps
    x_low  = x0 + low eps, the same eps (training), or the teacher's step from x_high to low (distillation)
    loss   = E d(f(x_high, high), sg f(x_low, low)) / (high - low),       d(a, b) = sqrt(|a - b|^2 + c^2) - c

The improved recipe (Song & Dhariwal 2024): c = 0.00054 sqrt(dim); low and high adjacent on the polynomial grid of N(k)
intervals, N(k) = min(first 2^floor(k / K'), last), K' = floor(K / (log2 floor(last / first) + 1)), so that a run of K
steps ends with `last`; the interval is the one that ln sigma ~ N(mean, std^2) falls into; the target is the online
network, not an average.

f is the jump of a flow map from sigma to sigma_min (flow_maps.py, tau = sigma_min); a network without tau makes it an
Euler step of D. For EDM's D it gives the published c_out = sigma_data (sigma - sigma_min) /
sqrt(sigma^2 + sigma_data^2) and c_skip = (sigma_data^2 + sigma sigma_min) / (sigma^2 + sigma_data^2). It applies to
networks of every convention, and lets the student start from a teacher's weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from jaxdiff import flow_maps
from jaxdiff.conditions import Cond
from jaxdiff.denoisers import Denoiser, per_example
from jaxdiff.errors import choose
from jaxdiff.methods import flow_map
from jaxdiff.methods.flow_targets import FlowMapOptions, Networks
from jaxdiff.methods.method import Examples, Method, Metrics, Parts, pseudo_huber


@dataclass(frozen=True)
class Options(FlowMapOptions):
    """Options of `method.name = "consistency"`."""

    solver: str = "heun"  # the teacher's solver: heun, euler
    rho: float = 7.0  # (0, inf) exponent of the grid
    first: int = 10  # [1, 2**31) initial number of intervals, doubled until it reaches `last`
    last: int = 1280  # [1, 2**31) final number of intervals: `first`, or at least twice as many
    mean: float = -1.1  # (-inf, inf) of ln sigma, from which intervals are drawn
    std: float = 2.0  # [0, inf) of ln sigma
    huber: float = 0.00054  # [0, inf) c / sqrt(dim) of the pseudo-Huber loss

    def __post_init__(self) -> None:
        super().__post_init__()
        choose(self.solver, ("heun", "euler"), "solver of a consistency teacher")
        if not 1 <= self.first <= self.last:
            raise ValueError(f"consistency needs 1 <= first <= last, got {self.first} and {self.last}")
        if self.first < self.last < 2 * self.first:
            raise ValueError(
                f"consistency doubles its intervals, so last must equal first or be at least twice as large, got "
                f"first={self.first} and last={self.last}"
            )
        if self.guidance != 1.0 and not self.distil:
            raise ValueError(f"guidance={self.guidance} applies to the teacher and needs distil=True")


check_sample = flow_map.check_ends


def consistent(denoise: Denoiser, sigma_min: float) -> Denoiser:
    """f(x, sigma): the Euler step of a denoiser down to sigma_min, where it is the identity."""
    return flow_maps.ending(flow_maps.of_denoiser(denoise), sigma_min)


def intervals(step: Array, total: int, first: int, last: int) -> Array:
    """N(k): the number of intervals at a step of `total`; doubled at every stage, up to `last`."""
    ratio = last // first
    stage = step // max(int(total / (math.log2(ratio) + 1)), 1)
    return jnp.minimum(first * 2 ** jnp.minimum(stage, ratio.bit_length()), last)


def neighbours(key: Array, n: int, count: Array, options: Options) -> tuple[Array, Array]:
    """(low, high) [n]: the intervals of a grid of `count` that n draws of ln sigma ~ N(mean, std^2) fall into."""
    lowest, highest = ((math.log(s) - options.mean) / options.std for s in (options.sigma_min, options.sigma_max))
    drawn = jnp.exp(options.mean + options.std * jax.random.truncated_normal(key, lowest, highest, (n,)))
    rho = options.rho
    begin, end = options.sigma_min ** (1 / rho), options.sigma_max ** (1 / rho)
    place = count.astype(jnp.float32) * (drawn ** (1 / rho) - begin) / (end - begin)
    index = jnp.clip(jnp.floor(place), 0, count.astype(jnp.float32) - 1)

    def level(i: Array) -> Array:
        return (begin + i / count.astype(jnp.float32) * (end - begin)) ** rho

    return level(index), level(index + 1)


def follow(teacher: Denoiser, x: Array, high: Array, low: Array, cond: Cond, solver: str = "heun") -> Array:
    """One step of the teacher's trajectory from x at level `high` to `low`, both per example."""
    slope = (x - teacher(x, high, cond)) / per_example(high, x)
    width = per_example(low - high, x)
    ahead = x + width * slope
    if solver == "euler":
        return ahead
    return x + width * (slope + (ahead - teacher(ahead, low, cond)) / per_example(low, x)) / 2


def build(options: Options, parts: Parts) -> Method:
    """Train f for `parts.total` steps; with `distil`, along the trajectories of the teacher it starts from.

    Sampling applies f once, or several times with fresh noise in between (`solvers.renoise`); a run's denoiser is f.
    """

    def levels(key: Array, n: int, step: Array) -> tuple[dict[str, Array], Metrics]:
        count = intervals(step, parts.total, options.first, options.last)
        low, high = neighbours(key, n, count, options)
        return {"low": low, "high": high}, {"intervals": count.astype(jnp.float32)}

    def rule(networks: Networks, examples: Examples) -> tuple[Array, Metrics]:
        low, high, cond = examples["low"], examples["high"], examples.get("cond")
        x = examples["x0"] + per_example(high, examples["x0"]) * examples["eps"]
        if networks.teacher is None:
            below = examples["x0"] + per_example(low, x) * examples["eps"]
        else:
            below = follow(networks.teacher, x, high, low, cond, options.solver)
        target = flow_maps.ending(networks.target, options.sigma_min)(below, low, cond)
        made = flow_maps.ending(networks.student, options.sigma_min)(x, high, cond)
        apart = pseudo_huber(made, jax.lax.stop_gradient(target), options.huber)
        return (apart / (high - low)).mean(), {}

    return flow_map.flow_map(options, parts, levels, rule, flow_map.by_ends(parts, options.sigma_min))
