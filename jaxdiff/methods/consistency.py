"""Consistency models: one evaluation maps any point of a trajectory to its end (Song et al. 2023).

    f(x, sigma) = x + (sigma_min - sigma) (x - D(x, sigma)) / sigma,      f(x, sigma_min) = x
    x_high = x0 + high eps
    x_low  = x0 + low eps, the same eps (training), or the teacher's step from x_high to low (distillation)
    loss   = E d(f(x_high, high), sg f(x_low, low)) / (high - low),       d(a, b) = sqrt(|a - b|^2 + c^2) - c

The improved recipe (Song & Dhariwal 2024): c = 0.00054 sqrt(dim); low and high adjacent on the polynomial grid of N(k)
intervals, N(k) = min(first 2^floor(k / K'), last), K' = floor(K / (log2 floor(last / first) + 1)), so that a run of K
steps ends with `last`; the interval is the one that ln sigma ~ N(mean, std^2) falls into; the target is the online
network, not an average.

f is the Euler step of D down to sigma_min. For EDM's D it gives the published c_out = sigma_data (sigma - sigma_min) /
sqrt(sigma^2 + sigma_data^2) and c_skip = (sigma_data^2 + sigma sigma_min) / (sigma^2 + sigma_data^2). It applies to
networks of every convention, and lets the student start from a teacher's weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike
from ml_collections import ConfigDict

from jaxdiff import denoisers
from jaxdiff.conditions import SEMANTIC, Cond
from jaxdiff.denoisers import Denoiser, Sigma, per_example
from jaxdiff.errors import choose
from jaxdiff.methods.averaging import average
from jaxdiff.methods.method import (
    Batch,
    Examples,
    Frozen,
    Method,
    Metrics,
    Parts,
    TrainState,
    accumulate,
    advance,
    data_of,
    draw_noise,
    init_from_teacher,
    pseudo_huber,
    start,
    update,
    with_cond,
)
from jaxdiff.trees import Params, Tree


@dataclass(frozen=True)
class Options:
    """Options of `method.name = "consistency"`."""

    distil: bool = False  # distil a teacher; False: train from data alone
    solver: str = "heun"  # the teacher's solver: heun, euler
    guidance: float = 1.0  # guidance scale of the teacher
    sigma_min: float = 0.002  # where f is the identity
    sigma_max: float = 80.0  # where trajectories start
    rho: float = 7.0  # exponent of the grid
    first: int = 10  # initial number of intervals, doubled until it reaches `last`
    last: int = 1280  # final number of intervals: `first`, or at least twice as many
    mean: float = -1.1  # of ln sigma, from which intervals are drawn
    std: float = 2.0  # of ln sigma
    huber: float = 0.00054  # c / sqrt(dim) of the pseudo-Huber loss
    target_decay: float = 0.0  # decay of an averaged target network; 0: the online network is the target

    def __post_init__(self) -> None:
        choose(self.solver, ("heun", "euler"), "solver of a consistency teacher")
        if not 0 < self.sigma_min < self.sigma_max:
            raise ValueError(f"consistency needs 0 < sigma_min < sigma_max, got {self.sigma_min} and {self.sigma_max}")
        if not 1 <= self.first <= self.last:
            raise ValueError(f"consistency needs 1 <= first <= last, got {self.first} and {self.last}")
        if self.first < self.last < 2 * self.first:
            raise ValueError(
                f"consistency doubles its intervals, so last must equal first or be at least twice as large, got "
                f"first={self.first} and last={self.last}"
            )
        if not 0 <= self.target_decay < 1:
            raise ValueError(f"target_decay must be in [0, 1), 0 for no average, got {self.target_decay}")
        if self.guidance != 1.0 and not self.distil:
            raise ValueError(f"guidance={self.guidance} applies to the teacher and needs distil=True")


def check_sample(options: Options, sample: ConfigDict) -> None:
    """A consistency model is sampled by the renoise solver, within the noise levels it was trained for."""
    if sample.solver != "renoise" or not sample.final_denoise or sample.afs or sample.guidance != 1.0:
        raise ValueError(
            f"a consistency model needs sample.solver='renoise', sample.final_denoise=True, sample.afs=False and "
            f"sample.guidance=1.0, got {sample.solver!r}, {sample.final_denoise}, {sample.afs} and {sample.guidance}"
        )
    if sample.sigma_min < options.sigma_min or sample.sigma_max > options.sigma_max:
        raise ValueError(
            f"this consistency model is trained from consistency.sigma_min={options.sigma_min} to "
            f"sigma_max={options.sigma_max}; sample.sigma_min={sample.sigma_min} and "
            f"sample.sigma_max={sample.sigma_max} must lie within that range"
        )


def consistent(denoise: Denoiser, sigma_min: float) -> Denoiser:
    """f(x, sigma): the Euler step of a denoiser down to sigma_min, where it is the identity."""

    def function(x: Array, sigma: Sigma, cond: Cond = None) -> Array:
        level = per_example(jnp.asarray(sigma, x.dtype), x)
        return x + (sigma_min - level) * (x - denoise(x, sigma, cond)) / level

    return function


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
    conditions, teacher = parts.cond, parts.teacher
    optimizer = parts.optimizers.scheduled
    null = conditions.null(SEMANTIC)
    if options.distil and teacher is None:
        raise ValueError("consistency distillation needs a teacher: pass Parts(teacher=...), or set distil=False")
    if not options.distil and teacher is not None:
        raise ValueError("a teacher was given, but distil=False; set distil=True")
    if options.guidance != 1.0 and null is None:
        raise ValueError(f"guidance={options.guidance} needs a network conditioned on classes or text")

    def function(params: Params, dropout: Array | None = None) -> Denoiser:
        return consistent(parts.denoiser(params, dropout=dropout), options.sigma_min)

    def guide(frozen: Mapping[str, Params]) -> Denoiser:
        assert teacher is not None
        exact = teacher.denoiser(frozen["teacher"])
        return exact if options.guidance == 1.0 else denoisers.guided(exact, options.guidance, null)

    def init(key: Array, batch: Batch, frozen: Mapping[str, Params] | None = None) -> TrainState:
        params = parts.initial(key, batch)
        if teacher is not None:
            if frozen is None:
                raise ValueError("distillation needs a teacher: init(key, batch, {'teacher': parameters})")
            params = init_from_teacher(params, frozen["teacher"] if teacher.own else {})
        averages = []
        if parts.average is not None:
            averages.append("ema")
        if options.target_decay:
            averages.append("target")
        return start({"student": params}, {"student": optimizer}, averages, frozen)

    def loss(params: Params, state: TrainState, examples: Examples, dropout: Array) -> Array:
        low, high, cond = examples["low"], examples["high"], examples.get("cond")
        x = examples["x0"] + per_example(high, examples["x0"]) * examples["eps"]
        if options.distil:
            below = follow(guide(state.frozen), x, high, low, cond, options.solver)
        else:
            below = examples["x0"] + per_example(low, x) * examples["eps"]
        target = function(state.averages.get("target", params), dropout)(below, low, cond)
        apart = pseudo_huber(function(params, dropout)(x, high, cond), jax.lax.stop_gradient(target), options.huber)
        return (apart / (high - low)).mean()

    def step(state: TrainState, batch: Batch, key: Array) -> tuple[TrainState, Metrics]:
        keys = dict(zip(("sigma", "eps", "dropout"), jax.random.split(key, 3), strict=True))
        x0, cond = data_of(batch), conditions.of(batch)
        eps, paired = draw_noise(keys["eps"], x0, cond, parts.couple)
        count = intervals(state.step, parts.total, options.first, options.last)
        low, high = neighbours(keys["sigma"], len(x0), count, options)
        examples = with_cond({"x0": x0, "eps": eps, "low": low, "high": high}, cond)

        def gradient(params: Params, examples: Examples, part: ArrayLike) -> tuple[Tree, None]:
            dropout = jax.random.fold_in(keys["dropout"], part)
            return jax.value_and_grad(loss)(params, state, examples, dropout), None

        params = state.params["student"]
        (value, gradients), _ = accumulate(gradient, params, examples, parts.accum_steps)
        params, opt_state = update(optimizer, gradients, state.opt_state["student"], params)
        rate = parts.rate(state.step + 1, len(x0))
        targets = {}
        if "target" in state.averages:
            targets["target"] = average(jnp.float32(1 - options.target_decay), state.averages["target"], params)
        metrics = {"loss": value, "grad_norm": optax.tree.norm(gradients), "intervals": count.astype(jnp.float32)}
        metrics |= {"ema_decay": 1 - rate, **paired}
        return advance(state, params, opt_state, rate, **targets), metrics

    def sample(params: Params, noise: Array, cond: Cond = None, key: Array | None = None) -> Array:
        assert parts.sampling.solve is not None
        return parts.sampling.solve(function(params), noise, cond, key)

    frozen: dict[str, Frozen] = {}
    if teacher is not None:
        frozen["teacher"] = teacher.frozen
    return Method(init, step, sample, function, frozen)
