"""SiD, score identity distillation (Zhou et al., ICML 2024), without data: a Fisher divergence between noisy densities.

With x = g(z) + sigma eps and gap = D_T(x) - D_S(x), the generator's loss at fixed D_S is

    L = E w gap . ((D_T(x) - g(z)) - alpha gap),        w = 1 / mean |g(z) - D_T(x)| per example, detached

Its gradient flows through g(z) and through x, so through the inputs of both networks. In expectation D_S(x) replaces
g(z) and L = (1 - alpha) E w |gap|^2, but since D_S is held fixed alpha changes the direction of the gradient and not
only its size: 1.2 is the authors' choice, 1.0 the safer one.

Teacher N(m, s^2), generator a + b z, D_S exact, w = 1, S = s^2/(s^2 + sigma^2), B = b^2/(b^2 + sigma^2), Q = S - B:

    dL/da = (m - a)(1 - S)(Q (1 - 2 alpha) + S - 1),    dL/db = -2 b Q ((1 - S) + alpha Q)

At alpha = 1.2, dL/db has the wrong sign where B - S > 5 (1 - B): a generator much wider than its teacher at small sigma
grows wider. At alpha = 1 it never has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
from jax import Array

from jaxdiff.methods.generators import StudentSteps
from jaxdiff.methods.method import Examples, Method, Metrics, Parts
from jaxdiff.methods.score_distillation import score_distillation
from jaxdiff.methods.score_rules import Networks, Rule, ScoreOptions, gap_metrics, noised, through_images, weighting
from jaxdiff.noise.levels import LossWeight


@dataclass(frozen=True)
class Options(ScoreOptions, StudentSteps):
    """Options of `method.name = "sid"`."""

    alpha: float = 1.2  # (-inf, inf) 1.0 is safer where the generator starts far from its teacher
    weight: str | LossWeight = "dmd"  # w: dmd, or by noise level as diffusion.weight


def build(options: Options, parts: Parts) -> Method:
    """Distil a teacher through the gradients of both scores."""
    return score_distillation(options, parts, rule(options, parts))


def rule(options: Options, parts: Parts) -> Rule:
    """The gradient of L by the generator, D_S held fixed."""
    weight = weighting(options.weight, parts)

    def slope(networks: Networks, made: Array, examples: Examples) -> tuple[Array, Metrics]:
        def loss(made: Array) -> tuple[Array, Metrics]:
            losses, metrics = identity_losses(networks, made, examples, options.alpha, weight)
            return losses.mean(), metrics

        (value, metrics), slope = jax.value_and_grad(loss, has_aux=True)(made)
        return slope, {"loss": value, **metrics}

    return through_images(slope)


def identity_losses(
    networks: Networks, made: Array, examples: Examples, alpha: float, weight: Callable[[Array, Array, Array], Array]
) -> tuple[Array, Metrics]:
    """The loss of each example, its mean over pixels, and metrics."""
    sigma, cond = examples["sigma"], examples.get("cond")
    x = noised(made, examples)
    teacher = networks.teacher(x, sigma, cond)
    gap = teacher - networks.score(x, sigma, cond)
    each = (gap * ((teacher - made) - alpha * gap)).reshape(len(made), -1).mean(1)
    return weight(made, teacher, sigma) * each, gap_metrics(gap, sigma)
