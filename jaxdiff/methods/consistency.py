"""Consistency models: one evaluation carries any point of a trajectory to its end (Song et al. 2023).

    f(x, sigma) = x + (sigma_min - sigma) (x - D(x, sigma)) / sigma,      f(x, sigma_min) = x
    x_high = x0 + high eps
    x_low  = x0 + low eps, the same eps (training), or the teacher's step from x_high to low (distillation)
    loss   = E d(f(x_high, high), stop f(x_low, low)) / (high - low),     d(a, b) = sqrt(|a - b|^2 + c^2) - c

The improved recipe (Song & Dhariwal 2024): c = 0.00054 sqrt(dim); low and high neighbours on the polynomial grid of
N(k) intervals, N(k) = min(first 2^floor(k / K'), last), K' = floor(K / (log2 floor(last / first) + 1)); the interval is
the one that ln sigma ~ N(mean, std^2) falls into; the target is the trained network itself, not an average.

f is the Euler step of D down to sigma_min: in EDM's scaling the network has the published weight sigma_data (sigma -
sigma_min) / sqrt(sigma^2 + sigma_data^2), x the weight (sigma_data^2 + sigma sigma_min) / (sigma^2 + sigma_data^2). It
holds for networks of every convention, and a teacher's weights are a good start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import struct
from jax import Array

from jaxdiff import denoisers
from jaxdiff.denoisers import Cond, Denoiser, Sigma, per_example
from jaxdiff.errors import pick
from jaxdiff.methods import ema as ema_lib
from jaxdiff.methods.denoise import Sampler, draw_noise
from jaxdiff.methods.method import Batch, Method, Metrics, accumulate, adopt, cond_of, data_of, pseudo_huber, update
from jaxdiff.models import network
from jaxdiff.noise.immiscible import Coupling


@struct.dataclass
class State:
    """Everything that must survive a restart. `target` is None when the target is the trained network itself."""

    step: Any
    params: Any
    ema: Any
    opt_state: Any
    target: Any
    frozen: Any  # {"teacher": parameters} of a distillation


def consistent(denoise: Denoiser, sigma_min: float) -> Denoiser:
    """f(x, sigma): the Euler step of a denoiser down to sigma_min, where it is the identity."""

    def function(x: Array, sigma: Sigma, cond: Cond = None) -> Array:
        level = per_example(jnp.asarray(sigma, x.dtype), x)
        return x + (sigma_min - level) * (x - denoise(x, sigma, cond)) / level

    return function


def intervals(step: Array, total: int, first: int, last: int) -> Array:
    """N(k): how many intervals the grid has in a step of `total`; twice as many in every stage, `last` in the end."""
    doublings = (last // first).bit_length() - 1  # floor(log2)
    stage = step // max(total // (doublings + 1), 1)
    return jnp.minimum(first * 2 ** jnp.minimum(stage, doublings + 1), last)


def neighbours(
    key: Array, n: int, count: Array, *, sigma_min: float, sigma_max: float, rho: float, mean: float, std: float
) -> tuple[Array, Array]:
    """(low, high) [n]: the intervals, of `count` in the grid, that n draws of ln sigma ~ N(mean, std^2) fall into."""
    lowest, highest = ((math.log(s) - mean) / std for s in (sigma_min, sigma_max))
    drawn = jnp.exp(mean + std * jax.random.truncated_normal(key, lowest, highest, (n,)))
    start, stop = sigma_min ** (1 / rho), sigma_max ** (1 / rho)
    place = count.astype(jnp.float32) * (drawn ** (1 / rho) - start) / (stop - start)
    index = jnp.clip(jnp.floor(place), 0, count.astype(jnp.float32) - 1)

    def level(i: Array) -> Array:
        return (start + i / count.astype(jnp.float32) * (stop - start)) ** rho

    return level(index), level(index + 1)


def follow(teacher: Denoiser, x: Array, high: Array, low: Array, cond: Cond, solver: str = "heun") -> Array:
    """One step of the teacher's trajectory from x at level `high` to `low`, both by example."""
    slope = (x - teacher(x, high, cond)) / per_example(high, x)
    width = per_example(low - high, x)
    ahead = x + width * slope
    if solver == "euler":
        return ahead
    return x + width * (slope + (ahead - teacher(ahead, low, cond)) / per_example(low, x)) / 2


def consistency(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    sampler: Sampler,
    *,
    total: int,
    wrapper: Callable[..., Denoiser] = denoisers.edm,
    teacher: Callable[[Any], Denoiser] | None = None,
    distil: bool = False,
    solver: str = "heun",
    guidance: float = 1.0,
    null: Cond = None,
    sigma_min: float = 0.002,
    sigma_max: float = 80.0,
    rho: float = 7.0,
    first: int = 10,
    last: int = 1280,
    mean: float = -1.1,
    std: float = 2.0,
    huber: float = 0.00054,
    target_decay: float = 0.0,
    decay: ema_lib.Decay | None = None,
    couple: Coupling | None = None,
    parts: int = 1,
) -> Method:
    """Train f for `total` steps; with `distil`, along a teacher's trajectories, whose weights it starts from.

    Then `init(key, batch, frozen)` takes {"teacher": its parameters}, and `teacher` makes a denoiser of them where it
    is not `wrapper(network)` (an analytic one has {}: f then starts untrained). `solver` ("heun", "euler") and
    `guidance` are the teacher's. `couple` pairs the batch's noises with its images. `target_decay` averages the
    target's parameters, as the first consistency models did. Sampling applies f once, or more often after new noise
    (`solvers.renoise`); the denoiser of a state is f.
    """
    pick({"heun": 0, "euler": 0}, solver, "solver of a consistency teacher")
    decay = decay or ema_lib.constant(0.0)
    if not 0 < sigma_min < sigma_max:
        raise ValueError(f"consistency needs 0 < sigma_min < sigma_max, got {sigma_min} and {sigma_max}")
    if not 1 <= first <= last:
        raise ValueError(f"the grid grows from first to last intervals: 1 <= first <= last, got {first} and {last}")
    if not 0 <= target_decay < 1:
        raise ValueError(f"target_decay is in [0, 1), 0 for no average, got {target_decay}")
    if guidance != 1.0 and not (distil and null):
        raise ValueError(f"guidance={guidance} is a teacher's: it needs distil=True and null values")
    if not distil and teacher is not None:
        raise ValueError("a teacher is for distillation: pass distil=True as well")

    def function(params: Any, dropout: Array | None = None) -> Denoiser:
        return consistent(wrapper(network(model, params, dropout)), sigma_min)

    def guide(frozen: Any) -> Denoiser:
        exact = (teacher or (lambda params: wrapper(network(model, params))))(frozen["teacher"])
        return exact if guidance == 1.0 else denoisers.guided(exact, guidance, null)

    def init(key: Array, batch: Batch, frozen: Mapping[str, Any] | None = None) -> State:
        x0 = data_of(batch)
        params = model.init(key, x0, jnp.ones(x0.shape[0]), cond_of(batch))["params"]
        if distil:
            if frozen is None:
                raise ValueError("distillation needs a teacher: init(key, batch, {'teacher': parameters})")
            params = adopt(params, {} if teacher is not None else frozen["teacher"])
            frozen = {"teacher": jax.tree.map(jnp.copy, frozen["teacher"])}
        ema, target = jax.tree.map(jnp.copy, params), jax.tree.map(jnp.copy, params) if target_decay else None
        return State(jnp.int32(0), params, ema, optimizer.init(params), target, frozen)

    def loss(params: Any, state: State, examples: dict[str, Any], dropout: Array) -> Array:
        low, high, cond = examples["low"], examples["high"], examples.get("cond")
        x = examples["x0"] + per_example(high, examples["x0"]) * examples["eps"]
        if distil:
            below = follow(guide(state.frozen), x, high, low, cond, solver)
        else:
            below = examples["x0"] + per_example(low, x) * examples["eps"]
        target = function(params if state.target is None else state.target, dropout)(below, low, cond)
        apart = pseudo_huber(function(params, dropout)(x, high, cond), jax.lax.stop_gradient(target), huber)
        return (apart / (high - low)).mean()

    def step(state: State, batch: Batch, key: Array) -> tuple[State, Metrics]:
        keys = dict(zip(("sigma", "eps", "dropout"), jax.random.split(key, 3), strict=True))
        x0, cond = data_of(batch), cond_of(batch)
        eps, paired = draw_noise(keys["eps"], x0, cond, couple)
        count = intervals(state.step, total, first, last)
        where = {"sigma_min": sigma_min, "sigma_max": sigma_max, "rho": rho, "mean": mean, "std": std}
        low, high = neighbours(keys["sigma"], len(x0), count, **where)
        examples = {"x0": x0, "eps": eps, "low": low, "high": high, **({} if cond is None else {"cond": cond})}

        def gradient(params: Any, examples: Any, part: Any) -> tuple[Any, None]:
            dropout = jax.random.fold_in(keys["dropout"], part)
            return jax.value_and_grad(loss)(params, state, examples, dropout), None

        (value, gradients), _ = accumulate(gradient, state.params, examples, parts)
        params, opt_state = update(optimizer, gradients, state.opt_state, state.params)
        done = state.step + 1
        rate = decay(done, x0.shape[0])
        metrics = {"loss": value, "grad_norm": optax.tree.norm(gradients), "intervals": count.astype(jnp.float32)}
        average = ema_lib.average(rate, state.ema, params)
        target = None if state.target is None else ema_lib.average(jnp.float32(target_decay), state.target, params)
        state = replace(state, step=done, params=params, ema=average, opt_state=opt_state, target=target)
        return state, {**metrics, "ema_decay": jnp.asarray(rate), **paired}

    def denoiser(state: State) -> Denoiser:
        return function(state.ema)

    def sample(state: State, noise: Array, cond: Cond = None, key: Array | None = None) -> Array:
        return sampler(denoiser(state), noise, cond, key)

    def export(state: State) -> State:
        return State(state.step, None, state.ema, None, None, None)

    return Method(init, step, sample, denoiser, export)
