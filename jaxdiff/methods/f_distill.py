"""f-distill (Xu et al. 2025): any f-divergence, by the ratio of densities that a head estimates.

For D_f(p | q) = E_q f(p/q), p the real and q the generated noisy density, r = p/q = exp(C) and gap as in
`diff_instruct.py`, the gradient is the reverse divergence's times h(r) = f''(r) r^2:

    slope of the images   -h(r) w gap + gan grad_x mean softplus(-C(x))

    reverse_kl  1            the mode-seeking divergence of Diff-Instruct and DMD
    softened    1 / (1 + r)  the softened reverse KL: bounded, gentle where the student lacks mass
    js          r / (1 + r)  Jensen-Shannon: bounded
    hellinger   sqrt(r)      squared Hellinger
    kl          r            the forward divergence, which covers modes; the largest variance
    jeffreys    1 + r        forward plus reverse

Generated images where the data have more mass than the student move further. The ratio is clipped and divided by its
running mean at similar noise levels, h by its own (`heads.py`); w is DMD's. With a head that knows nothing, r = 1, this
is DMD2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from jaxdiff.errors import pick
from jaxdiff.methods.diff_instruct import gap_slope
from jaxdiff.methods.dmd2 import with_adversary
from jaxdiff.methods.generators import StudentSteps
from jaxdiff.methods.heads import HeadOptions, RatioWeight
from jaxdiff.methods.method import Examples, Method, Metrics, Parts
from jaxdiff.methods.score_distillation import score_distillation
from jaxdiff.methods.score_rules import Networks, Rule, ScoreOptions, noised, through_images, weighting
from jaxdiff.noise.levels import LossWeight

DIVERGENCES: dict[str, Callable[[Array], Array]] = {
    "reverse_kl": jnp.ones_like,
    "softened": lambda r: 1 / (1 + r),
    "js": lambda r: r / (1 + r),
    "hellinger": jnp.sqrt,
    "kl": lambda r: r,
    "jeffreys": lambda r: 1 + r,
}


@dataclass(frozen=True)
class Options(ScoreOptions, HeadOptions, StudentSteps):
    """Options of `method.name = "f_distill"`."""

    divergence: str = "js"  # reverse_kl, softened, js, hellinger, kl, jeffreys
    ratio_decay: float = 0.99  # [0, 1) per step, of the running means that normalise the ratio
    weight: str | LossWeight = "dmd"  # w: dmd, or by noise level as diffusion.weight


def build(options: Options, parts: Parts) -> Method:
    """Distil a teacher by the chosen divergence."""
    ratio = RatioWeight(pick(DIVERGENCES, options.divergence, "divergence"), options.ratio_decay)
    return score_distillation(options, parts, rule(options, parts, ratio), head=options, ratio=ratio)


def rule(options: Options, parts: Parts, ratio: RatioWeight) -> Rule:
    """J_g^T (-h(r) w gap + gan grad_x mean softplus(-C(x)))."""
    weight = weighting(options.weight, parts)

    def slope(networks: Networks, made: Array, examples: Examples) -> tuple[Array, Metrics]:
        factor, seen = by_ratio(networks, made, examples, ratio)
        found, metrics = gap_slope(networks, made, examples, weight, factor)
        return with_adversary(networks, made, examples, options.gan, found, {**metrics, **seen})

    return through_images(slope)


def by_ratio(networks: Networks, made: Array, examples: Examples, ratio: RatioWeight) -> tuple[Array, Metrics]:
    """h(r) over its running mean [b], and metrics: the sums of the ratio, and what part of a batch the weights leave.

    `effective` is (sum weight)^2 / (n sum weight^2): 1 for equal weights, 1/n if one example has all of it.
    """
    assert networks.head is not None and networks.means is not None
    logits = networks.head(noised(made, examples), examples["sigma"], examples.get("cond"))
    factor, sums = ratio.weights(networks.means, logits, examples["sigma"])
    effective = jnp.square(factor.mean()) / jnp.maximum(jnp.square(factor).mean(), 1e-20)
    return factor, {"ratio": sums, "effective": effective}
