"""Denoising score matching: the training of every teacher.

    sigma ~ levels,  eps ~ N(0, I),  x = x0 + sigma eps
    loss = E weight(sigma) |D(x, sigma, cond) - x0|^2        (mean over pixels and examples)

With some probability a condition is replaced by its null value, so that the network can be guided; control with one of
its own, so that the two can be weighed apart. Noises and images
of a batch may be paired by nearness first (`noise.coupling`): immiscible diffusion. For a network that can hide part of
its tokens (MDT) the same loss with tokens hidden is added.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import struct
from jax import Array

from jaxdiff import denoisers
from jaxdiff.denoisers import COND_KEYS, Cond, Denoiser
from jaxdiff.methods import ema as ema_lib
from jaxdiff.methods.method import Batch, Method, Metrics, accumulate, cond_of, data_of, update
from jaxdiff.models import network
from jaxdiff.noise.immiscible import Coupling
from jaxdiff.noise.levels import Levels, Weight, edm_weight, lognormal


@struct.dataclass
class State:
    """Everything that must survive a restart."""

    step: Any  # int32, or its shape
    params: Any
    ema: Any
    opt_state: Any


Sampler = Callable[[Denoiser, Array, Cond, Array | None], Array]  # (denoise, unit noise, cond, key) -> x0


def denoise(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    sampler: Sampler,
    *,
    wrapper: Callable[..., Denoiser] = denoisers.edm,
    levels: Levels | None = None,
    weight: Weight | None = None,
    decay: ema_lib.Decay | None = None,
    null: Cond = None,
    drop: float = 0.0,
    control_drop: float = 0.0,
    couple: Coupling | None = None,
    parts: int = 1,
) -> Method:
    """Train `wrapper(network)` to denoise. The defaults are EDM's levels and weight and no averaging (decay 0).

    `null` holds what stands for "no condition", e.g. {"label": num_classes}; each of its keys is dropped
    independently with probability `drop`, control with `control_drop`. `couple` pairs the batch's noises with its
    images. `parts` accumulates gradients over slices of the batch; pairs are made over all of it.
    """
    levels, weight = levels or lognormal(), weight or edm_weight()
    decay = decay or ema_lib.constant(0.0)
    if drop and not null:
        raise ValueError(f"drop={drop} needs null values to drop to, for example null={{'label': num_classes}}")
    if control_drop and "control" not in (null or {}):
        raise ValueError(f"control_drop={control_drop} needs null={{'control': conditioning.UNKNOWN}} to drop to")
    for name, value in (("drop", drop), ("control_drop", control_drop)):
        if not 0 <= value < 1:
            raise ValueError(f"{name} is a probability in [0, 1), got {value}")

    def init(key: Array, batch: Batch) -> State:
        x0 = data_of(batch)
        params = model.init(key, x0, jnp.ones(x0.shape[0]), cond_of(batch))["params"]
        return State(jnp.int32(0), params, jax.tree.map(jnp.copy, params), optimizer.init(params))

    def loss(params: Any, examples: dict[str, Any], dropout: Array) -> tuple[Array, Metrics]:
        value, error = denoising_loss(wrapper(network(model, params, dropout)), examples, weight)
        if getattr(model, "mask_ratio", ()):
            hiding = network(model, params, dropout, mask=jax.random.fold_in(dropout, 1))
            value = value + denoising_loss(wrapper(hiding), examples, weight)[0]
        return value, {"loss": value, "error": error}

    def step(state: State, batch: Batch, key: Array) -> tuple[State, Metrics]:
        keys = dict(zip(("sigma", "eps", "drop", "dropout"), jax.random.split(key, 4), strict=True))
        x0, cond = data_of(batch), cond_of(batch)
        eps, paired = draw_noise(keys["eps"], x0, cond, couple)
        examples: dict[str, Any] = {"x0": x0, "sigma": levels(keys["sigma"], x0.shape[0]), "eps": eps}
        if cond is not None:
            examples["cond"] = drop_conditions(keys["drop"], cond, null or {}, drop, control_drop)

        def gradient(params: Any, examples: Any, part: Any) -> tuple[tuple[Metrics, Any], None]:
            dropout = jax.random.fold_in(keys["dropout"], part)
            (_, metrics), gradients = jax.value_and_grad(loss, has_aux=True)(params, examples, dropout)
            return (metrics, gradients), None

        (metrics, gradients), _ = accumulate(gradient, state.params, examples, parts)
        params, opt_state = update(optimizer, gradients, state.opt_state, state.params)
        done = state.step + 1
        rate = decay(done, x0.shape[0])
        metrics |= {"grad_norm": optax.tree.norm(gradients), "ema_decay": jnp.asarray(rate), **paired}
        return State(done, params, ema_lib.average(rate, state.ema, params), opt_state), metrics

    def denoiser(state: State) -> Denoiser:
        return wrapper(network(model, state.ema))

    def sample(state: State, noise: Array, cond: Cond = None, key: Array | None = None) -> Array:
        return sampler(denoiser(state), noise, cond, key)

    def export(state: State) -> State:
        return State(state.step, None, state.ema, None)

    return Method(init, step, sample, denoiser, export)


def draw_noise(key: Array, x0: Array, cond: Cond, couple: Coupling | None) -> tuple[Array, Metrics]:
    """Unit noise like x0, each paired with its image by `couple`; and what that tells."""
    eps = jax.random.normal(key, x0.shape, x0.dtype)
    return (eps, {}) if couple is None else couple(x0, eps, cond, jax.random.fold_in(key, 1))


def denoising_loss(apply: Denoiser, examples: dict[str, Any], weight: Weight) -> tuple[Array, Array]:
    """The weighted and the plain mean of |D(x0 + sigma eps) - x0|^2 over `examples` (x0, sigma, eps, cond)."""
    x0, sigma = examples["x0"], examples["sigma"]
    x = x0 + denoisers.per_example(sigma, x0) * examples["eps"]
    error = jnp.square(apply(x, sigma, examples.get("cond")) - x0).reshape(x0.shape[0], -1).mean(1)
    return (weight(sigma) * error).mean(), error.mean()


def drop_conditions(
    key: Array, cond: dict[str, Any], null: Any, probability: float, control_probability: float = 0.0
) -> dict[str, Any]:
    """Each key of `null` replaced by its null value, per example and independently, with the given probability.

    A text goes with its mask and its pooled form; control has a probability of its own.
    """
    out = dict(cond)
    known = sorted(set(null) & set(cond))
    leaders = {name: "text" if name in ("text_mask", "pooled") and "text" in known else name for name in known}
    semantic = sorted(set(leaders.values()) - {"control"})
    for name, leader in leaders.items():
        apart = name == "control"
        rate = control_probability if apart else probability
        if not rate:
            continue
        number = len(COND_KEYS) if apart else semantic.index(leader)
        examples = jnp.shape(jax.tree.leaves(cond[name])[0])[:1]
        gone = jax.random.bernoulli(jax.random.fold_in(key, number), rate, examples)

        def swap(value: Any, empty: Any, gone: Array = gone) -> Array:
            value = jnp.asarray(value)
            return jnp.where(gone.reshape(-1, *(1 for _ in value.shape[1:])), jnp.asarray(empty, value.dtype), value)

        out[name] = jax.tree.map(swap, cond[name], denoisers.null_like(null[name], cond[name]))
    return out
