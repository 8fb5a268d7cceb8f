"""Denoising score matching: how teachers are trained.

    sigma ~ sampler,  eps ~ N(0, I),  x = x0 + sigma eps
    loss = E weight(sigma) |D(x, sigma, cond) - x0|^2        (mean over pixels and examples)

The semantic conditioning of an example is dropped (replaced by its null values) with some probability, to allow
guidance; control metadata independently, so that the two can be guided with separate scales. The noise of a batch may
first be assigned to the nearest images (`noise.coupling`): immiscible diffusion. For networks that mask tokens (MDT),
the same loss with masked tokens is added.

With `uncertainty`, a network that has u(sigma) = `log_variance` (EDM2) learns it as the logarithm of the error's
variance, and each noise level contributes equally to the gradient (Karras et al. 2024b):

    loss = E weight(sigma) / exp(u(sigma)) |D(x, sigma, cond) - x0|^2 + u(sigma)

`align` adds a term that aligns an activation of the network with a feature network's: `alignment.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike

from jaxdiff import ranges
from jaxdiff.conditions import CONTROL, SEMANTIC, Cond
from jaxdiff.denoisers import Denoiser, per_example
from jaxdiff.methods.alignment import Alignment, AlignOptions
from jaxdiff.methods.method import (
    Batch,
    Examples,
    Method,
    Metrics,
    Parts,
    TrainState,
    accumulate,
    advance,
    data_of,
    draw_noise,
    start,
    update,
    with_cond,
)
from jaxdiff.methods.optimization import unforced
from jaxdiff.noise.levels import LossWeight, loss_weight
from jaxdiff.trees import Params, Tree


@dataclass(frozen=True)
class Options:
    """Options of `method.name = "diffusion"`."""

    weight: str | LossWeight = "edm"  # loss weight by noise level: edm, min_snr, sigmoid, flow, eps, x0
    weight_options: Mapping[str, float] = field(default_factory=dict)  # its options: sigma_data; gamma; bias
    cond_dropout: float = 0.0  # [0, 1) probability of dropping the class or text of an example
    control_dropout: float = 0.0  # [0, 1) the same for control metadata, drawn independently; allows control_guidance
    uncertainty: bool = False  # weight noise levels by the uncertainty that the network learns (edm2)
    align: AlignOptions = field(default_factory=AlignOptions)

    def __post_init__(self) -> None:
        ranges.check(vars(self), ranges.of_class(Options), "diffusion.")


def build(options: Options, parts: Parts) -> Method:
    """Train the network as a denoiser."""
    model, conditions = parts.model, parts.cond
    optimizer = parts.optimizers.scheduled
    weight = loss_weight(options.weight, parts.convention, **options.weight_options)
    rates = {SEMANTIC: options.cond_dropout, CONTROL: options.control_dropout}
    _check(options, parts)
    aligned = alignment_of(options.align, parts)
    optimizers = {"student": optimizer, "projection": unforced(optimizer)}

    def init(key: Array, batch: Batch, frozen: Tree = None) -> TrainState:
        averages = () if parts.average is None else ("ema",)
        params = {"student": parts.initial(key, batch)}
        if aligned is None:
            return start(params, optimizers, averages)
        held = {"features": frozen["features"]}
        params["projection"] = aligned.start(jax.random.fold_in(key, 2), params["student"], held["features"], batch)
        return start(params, optimizers, averages, held)

    def loss(trained: Mapping[str, Params], examples: Examples, dropout: Array) -> tuple[Array, Metrics]:
        params, learned = trained["student"], None
        if options.uncertainty:
            variables = {"params": parts.weights(params)}
            learned = jnp.asarray(model.apply(variables, examples["sigma"], method="log_variance"))
        seen: dict[str, Array] = {}
        network = parts.denoiser(params, dropout=dropout)
        if aligned is not None:
            network = aligned.observed(params, seen, dropout)
        value, error = denoising_loss(network, examples, weight, learned)
        metrics = {"error": error}
        if aligned is not None:
            metrics["alignment"] = aligned.loss(trained["projection"], seen["h"], examples)
            value = value + options.align.weight * metrics["alignment"]
        if getattr(model, "mask_ratio", ()):
            masked = parts.denoiser(params, dropout=dropout, mask=jax.random.fold_in(dropout, 1))
            value = value + denoising_loss(masked, examples, weight, learned)[0]
        return value, {"loss": value, **metrics}

    def step(state: TrainState, batch: Batch, key: Array) -> tuple[TrainState, Metrics]:
        keys = dict(zip(("sigma", "eps", "drop", "dropout"), jax.random.split(key, 4), strict=True))
        x0, cond = data_of(batch), conditions.of(batch)
        eps, paired = draw_noise(keys["eps"], x0, cond, parts.couple)
        if cond is not None:
            cond = conditions.dropout(keys["drop"], cond, rates)
        examples = with_cond({"x0": x0, "sigma": parts.sigmas(keys["sigma"], len(x0)), "eps": eps}, cond)
        if aligned is not None:
            examples["features"] = aligned.targets(state.frozen["features"], x0)

        def gradient(trained: Params, examples: Examples, part: ArrayLike) -> tuple[tuple[Metrics, Params], None]:
            dropout = jax.random.fold_in(keys["dropout"], part)
            (_, metrics), gradients = jax.value_and_grad(loss, has_aux=True)(trained, examples, dropout)
            return (metrics, gradients), None

        (metrics, gradients), _ = accumulate(gradient, state.params, examples, parts.accum_steps)
        rate = parts.rate(state.step + 1, len(x0))
        metrics |= {"grad_norm": optax.tree.norm(gradients), "ema_decay": 1 - rate, **paired}
        new = {
            name: update(optimizers[name], gradients[name], state.opt_state[name], params)
            for name, params in state.params.items()
        }
        state = replace(
            state,
            params={name: params for name, (params, _) in new.items()},
            opt_state={name: opt_state for name, (_, opt_state) in new.items()},
        )
        return advance(state, *new["student"], rate), metrics

    def sample(params: Params, noise: Array, cond: Cond = None, key: Array | None = None) -> Array:
        assert parts.sampling.solve is not None
        return parts.sampling.solve(parts.denoiser(params), noise, cond, key)

    return Method(init, step, sample, parts.denoiser, {} if aligned is None else {"features": aligned.frozen})


def _check(options: Options, parts: Parts) -> None:
    if options.control_dropout and not parts.cond.has(CONTROL):
        raise ValueError(
            f"diffusion.control_dropout={options.control_dropout} needs control metadata to drop: set "
            "model.fields.control and data.options.control"
        )
    if options.uncertainty and not hasattr(parts.model, "log_variance"):
        raise ValueError(
            "diffusion.uncertainty=True needs a network that learns log_variance(sigma), which "
            f"{type(parts.model).__name__} does not; use model.name='edm2' or set it to False"
        )


def alignment_of(options: AlignOptions, parts: Parts) -> Alignment | None:
    """The alignment of the network with parts.features; None if it is off."""
    if not options.weight:
        return None
    if parts.features is None:
        raise ValueError("diffusion.align needs a feature network: pass Parts(features=...)")
    return Alignment(options, parts, parts.features)


def denoising_loss(
    apply: Denoiser, examples: Examples, weight: LossWeight, log_variance: Array | None = None
) -> tuple[Array, Array]:
    """The weighted and the plain mean of |D(x0 + sigma eps) - x0|^2 over `examples` (x0, sigma, eps, cond)."""
    x0, sigma = examples["x0"], examples["sigma"]
    x = x0 + per_example(sigma, x0) * examples["eps"]
    error = jnp.square(apply(x, sigma, examples.get("cond")) - x0).reshape(x0.shape[0], -1).mean(1)
    weighted = weight(sigma) * error
    if log_variance is not None:
        weighted = weighted * jnp.exp(-log_variance) + log_variance
    return weighted.mean(), error.mean()
