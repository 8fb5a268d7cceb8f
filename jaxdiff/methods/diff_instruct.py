"""Diff-Instruct (Luo et al., NeurIPS 2023), without data: the reverse divergence between noisy densities.

With x = g(z) + sigma eps, D_T and D_S the denoisers of the teacher's p_sigma and of the generator's p_g,

    grad KL(p_g | p_sigma) = -E J_g^T w gap / sigma^2,      gap = D_T(x) - D_S(x) = sigma^2 (score_T - score_S)

The update is -J_g^T w gap: w = 1 (`x0`) weights the divergence by sigma^2, and DMD's (Yin et al. 2024) is

    w = 1 / mean |g(z) - D_T(x)|        per example, detached: every level moves images by comparable amounts

Both networks are evaluated, neither is differentiated. EMD with one Langevin step that leaves z alone
(`emd.DIFF_INSTRUCT`) is this rule with the same w.

Teacher N(m, s^2), generator a + b z, D_S exact, w = 1, S = s^2/(s^2 + sigma^2), B = b^2/(b^2 + sigma^2):

    dL/da = -(m - a)(1 - S),    dL/db = -b (S - B)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jax import Array

from jaxdiff.denoisers import per_example
from jaxdiff.methods.generators import StudentSteps
from jaxdiff.methods.method import Examples, Method, Metrics, Parts
from jaxdiff.methods.score_distillation import score_distillation
from jaxdiff.methods.score_rules import Networks, Rule, ScoreOptions, gap_metrics, noised, through_images, weighting
from jaxdiff.noise.levels import LossWeight


@dataclass(frozen=True)
class Options(ScoreOptions, StudentSteps):
    """Options of `method.name = "diff_instruct"`."""

    weight: str | LossWeight = "x0"  # w: dmd, or by noise level as diffusion.weight; x0 = sigma^2 on the divergence


def build(options: Options, parts: Parts) -> Method:
    """Distil a teacher into a generator that covers its most likely modes."""
    return score_distillation(options, parts, rule(options, parts))


def rule(options: Options, parts: Parts) -> Rule:
    """-J_g^T w gap."""
    weight = weighting(options.weight, parts)

    def slope(networks: Networks, made: Array, examples: Examples) -> tuple[Array, Metrics]:
        return gap_slope(networks, made, examples, weight)

    return through_images(slope)


def gap_slope(
    networks: Networks,
    made: Array,
    examples: Examples,
    weight: Callable[[Array, Array, Array], Array],
    factor: Array | float = 1.0,
) -> tuple[Array, Metrics]:
    """-w gap per pixel, w times a further factor [b]; the loss is what EMD reports, mean w |gap|^2 / 2."""
    sigma, cond = examples["sigma"], examples.get("cond")
    x = noised(made, examples)
    teacher = networks.teacher(x, sigma, cond)
    gap = teacher - networks.score(x, sigma, cond)
    weighted = per_example(factor * weight(made, teacher, sigma), made) * gap
    return -weighted / made.size, {"loss": 0.5 * (weighted * gap).mean(), **gap_metrics(gap, sigma)}
