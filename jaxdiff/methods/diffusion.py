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
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike

from jaxdiff.conditions import CONTROL, SEMANTIC, Cond
from jaxdiff.denoisers import Denoiser, per_example
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
from jaxdiff.noise.levels import LossWeight, loss_weight
from jaxdiff.trees import Params, Tree


@dataclass(frozen=True)
class Options:
    """Options of `method.name = "diffusion"`."""

    weight: str | LossWeight = "edm"  # loss weight by noise level: edm, min_snr, sigmoid, flow, eps, x0
    weight_options: Mapping[str, float] = field(default_factory=dict)  # its options: sigma_data; gamma; bias
    cond_dropout: float = 0.0  # probability of dropping the class or text of an example
    control_dropout: float = 0.0  # the same for control metadata, drawn independently; allows control_guidance
    uncertainty: bool = False  # weight noise levels by the uncertainty that the network learns (edm2)

    def __post_init__(self) -> None:
        for name in ("cond_dropout", "control_dropout"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ValueError(f"diffusion.{name} must be a probability in [0, 1), got {value}")


def build(options: Options, parts: Parts) -> Method:
    """Train the network as a denoiser."""
    model, conditions = parts.model, parts.cond
    optimizer = parts.optimizers.scheduled
    weight = loss_weight(options.weight, parts.convention, **options.weight_options)
    rates = {SEMANTIC: options.cond_dropout, CONTROL: options.control_dropout}
    for group, rate in rates.items():
        if rate and group == CONTROL and not conditions.has(group):
            raise ValueError(
                f"diffusion.control_dropout={rate} needs control metadata to drop: set model.fields.control and "
                "data.options.control"
            )
    if options.uncertainty and not hasattr(model, "log_variance"):
        raise ValueError(
            f"diffusion.uncertainty=True needs a network that learns log_variance(sigma), which {type(model).__name__} "
            "does not; use model.name='edm2' or set it to False"
        )

    def init(key: Array, batch: Batch, frozen: Tree = None) -> TrainState:
        averages = () if parts.average is None else ("ema",)
        return start({"student": parts.initial(key, batch)}, {"student": optimizer}, averages)

    def loss(params: Params, examples: Examples, dropout: Array) -> tuple[Array, Metrics]:
        learned = None
        if options.uncertainty:
            learned = jnp.asarray(model.apply({"params": params}, examples["sigma"], method="log_variance"))
        value, error = denoising_loss(parts.denoiser(params, dropout=dropout), examples, weight, learned)
        if getattr(model, "mask_ratio", ()):
            masked = parts.denoiser(params, dropout=dropout, mask=jax.random.fold_in(dropout, 1))
            value = value + denoising_loss(masked, examples, weight, learned)[0]
        return value, {"loss": value, "error": error}

    def step(state: TrainState, batch: Batch, key: Array) -> tuple[TrainState, Metrics]:
        keys = dict(zip(("sigma", "eps", "drop", "dropout"), jax.random.split(key, 4), strict=True))
        x0, cond = data_of(batch), conditions.of(batch)
        eps, paired = draw_noise(keys["eps"], x0, cond, parts.couple)
        if cond is not None:
            cond = conditions.dropout(keys["drop"], cond, rates)
        examples = with_cond({"x0": x0, "sigma": parts.sigmas(keys["sigma"], len(x0)), "eps": eps}, cond)

        def gradient(params: Params, examples: Examples, part: ArrayLike) -> tuple[tuple[Metrics, Params], None]:
            dropout = jax.random.fold_in(keys["dropout"], part)
            (_, metrics), gradients = jax.value_and_grad(loss, has_aux=True)(params, examples, dropout)
            return (metrics, gradients), None

        params = state.params["student"]
        (metrics, gradients), _ = accumulate(gradient, params, examples, parts.accum_steps)
        params, opt_state = update(optimizer, gradients, state.opt_state["student"], params)
        rate = parts.rate(state.step + 1, len(x0))
        metrics |= {"grad_norm": optax.tree.norm(gradients), "ema_decay": 1 - rate, **paired}
        return advance(state, params, opt_state, rate), metrics

    def sample(params: Params, noise: Array, cond: Cond = None, key: Array | None = None) -> Array:
        assert parts.sampling.solve is not None
        return parts.sampling.solve(parts.denoiser(params), noise, cond, key)

    return Method(init, step, sample, parts.denoiser)


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
