"""DMD2 (Yin et al., NeurIPS 2024): distribution matching, and a head that compares with real images.

    slope of the images   -w gap + gan grad_x mean softplus(-C(x)),       x = g(z) + sigma eps

with gap and w of `diff_instruct.py` (w DMD's by default) and the head C of `heads.py`. The student score and the head
are updated several times per update of the generator (score_updates; the paper: 5), on the same real images with fresh
noise. The student may take several steps (`generators.py`). gan = 0 has no head and is DMD.

The teacher bounds what the first term can reach; the second lets the student pass it where real images are at hand.
"""

from __future__ import annotations

from dataclasses import dataclass

from jax import Array

from jaxdiff.methods.diff_instruct import gap_slope
from jaxdiff.methods.generators import StudentSteps
from jaxdiff.methods.heads import HeadOptions, adversarial
from jaxdiff.methods.method import Examples, Method, Metrics, Parts
from jaxdiff.methods.score_distillation import score_distillation
from jaxdiff.methods.score_rules import Networks, Rule, ScoreOptions, noised, through_images, weighting
from jaxdiff.noise.levels import LossWeight


@dataclass(frozen=True)
class Options(ScoreOptions, HeadOptions, StudentSteps):
    """Options of `method.name = "dmd2"`."""

    weight: str | LossWeight = "dmd"  # w: dmd, or by noise level as diffusion.weight


def build(options: Options, parts: Parts) -> Method:
    """Distil a teacher with the help of real images."""
    return score_distillation(options, parts, rule(options, parts), head=options if options.gan else None)


def rule(options: Options, parts: Parts) -> Rule:
    """J_g^T (-w gap + gan grad_x mean softplus(-C(x)))."""
    weight = weighting(options.weight, parts)

    def slope(networks: Networks, made: Array, examples: Examples) -> tuple[Array, Metrics]:
        found, metrics = gap_slope(networks, made, examples, weight)
        return with_adversary(networks, made, examples, options.gan, found, metrics)

    return through_images(slope)


def with_adversary(
    networks: Networks, made: Array, examples: Examples, gan: float, slope: Array, metrics: Metrics
) -> tuple[Array, Metrics]:
    """A slope and its metrics with the head's term added."""
    if not gan:
        return slope, metrics
    assert networks.head is not None
    value, more = adversarial(networks.head, noised(made, examples), examples["sigma"], examples.get("cond"))
    return slope + gan * more, {**metrics, "loss": metrics["loss"] + gan * value, "adversarial": value}
