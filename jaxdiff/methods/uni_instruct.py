"""Uni-Instruct (Wang et al. 2025): SiD's loss, weighted by the ratio of densities that a head estimates.

With q the generated and p the real density, r = p/q = exp(C), q_sigma and p_sigma with noise added,

    KL(q | p) = 1/2 int E_q   |score_p - score_q|^2 d sigma^2
    KL(p | q) = 1/2 int E_q r |score_p - score_q|^2 d sigma^2

so SiD's loss with the weight r is that of the forward divergence. With the losses of `sid.py`,

    L = E h(r) w gap . ((D_T(x) - g(z)) - alpha gap) + gan mean softplus(-C(x)),         h(r) detached

    kl          r               the forward divergence, the one of EMD, without a chain
    jeffreys    0.4 r + 0.6     the authors' mixture of forward and reverse
    reverse_kl  1               SiD with a head (SiDA)

The gradient flows through both networks, as in SiD, and through the head. The ratio is normalised by running means
(`heads.py`) where the authors divide by its sum over the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from jaxdiff.errors import pick
from jaxdiff.methods.dmd2 import with_adversary
from jaxdiff.methods.f_distill import by_ratio
from jaxdiff.methods.generators import StudentSteps
from jaxdiff.methods.heads import HeadOptions, RatioWeight
from jaxdiff.methods.method import Examples, Method, Metrics, Parts
from jaxdiff.methods.score_distillation import score_distillation
from jaxdiff.methods.score_rules import Networks, Rule, ScoreOptions, through_images, weighting
from jaxdiff.methods.sid import identity_losses
from jaxdiff.noise.levels import LossWeight

DIVERGENCES: dict[str, Callable[[Array], Array]] = {
    "kl": lambda r: r,
    "jeffreys": lambda r: 0.4 * r + 0.6,
    "reverse_kl": jnp.ones_like,
}


@dataclass(frozen=True)
class Options(ScoreOptions, HeadOptions, StudentSteps):
    """Options of `method.name = "uni_instruct"`."""

    divergence: str = "kl"  # kl, jeffreys, reverse_kl
    alpha: float = 1.2  # (-inf, inf) as sid.alpha
    ratio_decay: float = 0.99  # [0, 1) per step, of the running means that normalise the ratio
    weight: str | LossWeight = "dmd"  # w: dmd, or by noise level as diffusion.weight


def build(options: Options, parts: Parts) -> Method:
    """Distil a teacher by a weighted score identity and a head."""
    ratio = RatioWeight(pick(DIVERGENCES, options.divergence, "divergence"), options.ratio_decay)
    return score_distillation(options, parts, rule(options, parts, ratio), head=options, ratio=ratio)


def rule(options: Options, parts: Parts, ratio: RatioWeight) -> Rule:
    """The gradient of L by the generator, D_S and C held fixed."""
    weight = weighting(options.weight, parts)

    def slope(networks: Networks, made: Array, examples: Examples) -> tuple[Array, Metrics]:
        factor, seen = by_ratio(networks, made, examples, ratio)

        def loss(made: Array) -> tuple[Array, Metrics]:
            losses, metrics = identity_losses(networks, made, examples, options.alpha, weight)
            return (factor * losses).mean(), metrics

        (value, metrics), found = jax.value_and_grad(loss, has_aux=True)(made)
        metrics = {"loss": value, **metrics, **seen}
        return with_adversary(networks, made, examples, options.gan, found, metrics)

    return through_images(slope)
