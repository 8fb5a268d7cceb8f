"""What the rules of score distillation are written in: their options, their networks, their weights.

    rule(networks, params, examples)  -> (gradient of the generator, metrics)
    slope(networks, images, examples) -> (slope of the loss by the images, metrics)

`through_images(slope)` is the rule of a slope. Examples have z, eps, sigma, key and cond.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxdiff import noise
from jaxdiff.conditions import Cond
from jaxdiff.denoisers import Denoiser, per_example
from jaxdiff.errors import choose
from jaxdiff.methods.heads import Logits
from jaxdiff.methods.method import Examples, Metrics, Parts
from jaxdiff.noise.levels import LossWeight, SigmaSampler, at_least, loss_weight, uncovered
from jaxdiff.trees import Params


@dataclass(frozen=True)
class ScoreOptions:
    """Options shared by all score distillation methods."""

    guidance: float = 1.0  # (-inf, inf) guidance scale of the teacher; student score and generator are not guided
    input_scale: str = "sigma"  # the network's input: sigma_star z, or ("one") sqrt(1 + sigma_star^2) z
    sigma_sampler: str = ""  # levels of the rule and the student score, as noise.sigma_sampler; "": `noise`
    sigma_options: Mapping[str, float] = field(default_factory=dict)  # its options, as {"mean": 0.0, "std": 1.5}
    sigma_min: float = 0.0  # [0, inf) lower bound on the rule's levels: log-SNR is at most -2 ln sigma_min
    score_network: str = "teacher"  # of the student score: teacher (its weights too, if it has a network), student
    score_weight: str | LossWeight = "edm"  # loss weight of the student score, as diffusion.weight
    score_weight_options: Mapping[str, float] = field(default_factory=dict)  # its options
    score_levels: str = "chain"  # noise levels the student score is trained at: chain (those it is used at), noise
    score_rate: float = 1e-3  # [0, inf) learning rate of the student score; the generator's is optim.learning_rate
    score_updates: int = 1  # [1, 10000] student score updates per generator update
    dropout: bool = False  # enable dropout when training the student score

    def check(self) -> None:
        choose(self.score_levels, ("chain", "noise"), "score_levels")
        choose(self.score_network, ("teacher", "student"), "score_network")
        if self.score_updates < 1:
            raise ValueError(f"score_updates must be at least 1, got {self.score_updates}")


class Levels(NamedTuple):
    """Samplers of the noise levels of the rule and of the student score's training."""

    chain: SigmaSampler
    score: SigmaSampler

    @classmethod
    def of(cls, options: ScoreOptions, parts: Parts) -> Levels:
        sigmas = parts.sigmas
        if options.sigma_sampler:
            sigmas = noise.make_levels(options.sigma_sampler, parts.shift, **options.sigma_options)
        return cls(at_least(sigmas, options.sigma_min), sigmas if options.score_levels == "chain" else parts.sigmas)

    def warn_uncovered(self) -> None:
        """Warn if the rule often visits noise levels at which the student score is hardly trained."""
        with jax.ensure_compile_time_eval():
            share, low, high = uncovered(self.chain, self.score)
        if share > 0.05:
            warnings.warn(
                f"{100 * share:.0f} % of the chains' noise levels lie outside {low:.3g} to {high:.3g}, where 99 % of "
                "those of the student score lie: it is used where it is not trained. Set score_levels='chain' in the "
                "method's section, or widen `noise`",
                stacklevel=2,
            )


class Networks(NamedTuple):
    """The networks of one update, as functions."""

    teacher: Denoiser
    score: Denoiser
    generate: Callable[..., Array]  # (params, z, cond, start=None), for gradients w.r.t. params
    looped: Callable[[Array, Cond], Array]  # (z, cond), for gradients w.r.t. z inside loops
    head: Logits | None = None
    means: Array | None = None  # running means of the head's ratio


Rule = Callable[[Networks, Params, Examples], tuple[Params, Metrics]]
Slope = Callable[[Networks, Array, Examples], tuple[Array, Metrics]]


def through_images(slope: Slope) -> Rule:
    """The rule of a loss that depends on the generator by its images alone: J_g^T slope."""

    def rule(networks: Networks, params: Params, examples: Examples) -> tuple[Params, Metrics]:
        inputs = examples["z"], examples.get("cond"), examples.get("start")
        made, pull = jax.vjp(lambda params: networks.generate(params, *inputs), params)
        found, metrics = slope(networks, made, examples)
        (gradients,) = pull(found.astype(made.dtype))
        return gradients, {**metrics, "spread": made.std(0).mean()}

    return rule


def noised(made: Array, examples: Examples) -> Array:
    """x = g(z) + sigma eps."""
    return made + per_example(examples["sigma"], made) * examples["eps"]


def weighting(name: str | LossWeight, parts: Parts) -> Callable[[Array, Array, Array], Array]:
    """The weight [b] of examples by (g(z), D_T, sigma): a loss weight of sigma, or DMD's 1 / mean |g(z) - D_T|."""
    if name != "dmd":
        by_sigma = loss_weight(name, parts.convention)
        return lambda made, teacher, sigma: by_sigma(sigma)

    def weight(made: Array, teacher: Array, sigma: Array) -> Array:
        error = jnp.abs(made - teacher).reshape(len(made), -1).mean(1)
        return jax.lax.stop_gradient(1 / jnp.maximum(error, 1e-5))

    return weight


def gap_metrics(gap: Array, sigma: Array) -> Metrics:
    """The root mean square of (D_T - D_S) / sigma, which falls to zero as the densities meet."""
    return {"score_gap": jnp.sqrt(jnp.square(gap / per_example(sigma, gap)).mean())}
