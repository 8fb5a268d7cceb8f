"""Left and right when half of the images are mirrored: the network conditioned on flips or not, or no flips at all.

    python -m experiments.conditioning.flips [--steps=1200] [--seeds=3] [--out=runs/experiments]

left_right is the share of samples that look more like their caption than like it with left and right exchanged. Things
are circles of four colours. Networks conditioned on flips are sampled without one and, in the last row, with one: their
samples should then disobey.

In the first half of a training every second batch is without flips. With flips in half of the images from the start,
the side is the exclusive or of the flip and of a thing's place in the caption, and the network was still at chance
after 1,500 steps.
"""

from __future__ import annotations

from typing import Any

from experiments.conditioning.variant import Variant, chosen, parse, parser, report
from jaxdiff.data.shapes import COLOURS

CIRCLES = {
    "data.options.things": tuple(f"{colour} circle" for colour in COLOURS),
    "noise.mean": 0.0,
    "optim.learning_rate": 1e-3,
}
FLIPS = {**CIRCLES, "data.options.flip": True}
RECORDED = {**FLIPS, "data.options.control": ("flip",), "model.fields.control": {"keys": ("flip",)}}
VARIANTS: dict[str, dict[str, Any]] = {"recorded": RECORDED, "not recorded": FLIPS, "no flips": CIRCLES}
CLAIM = "prompts with left and right are obeyed only with flip conditioning; here: at least 95 %, else about half"


def gradual(args: Any, changes: dict[str, Any]) -> Variant:
    """A variant whose first half sees flips in every second batch only."""
    variant = Variant(args, changes)
    plain = Variant(args, {**changes, "data.options.flip": False}).dataset
    variant.data_at = lambda step: plain if step % 2 and step <= args.steps // 2 else variant.dataset
    return variant


def main() -> None:
    args = parse(parser(__doc__, steps=1200))
    variants = {name: gradual(args, VARIANTS[name]).train_all(name) for name in chosen(args, VARIANTS)}
    if "recorded" in variants:
        variants["recorded, flips requested"] = sampled_flipped(args, variants["recorded"])
    report(args, "flips", CLAIM, variants, "left_right")


def sampled_flipped(args: Any, recorded: Variant) -> Variant:
    """Samples of a trained variant, conditioned on a flip."""
    mirrored = Variant(args, {**RECORDED, "sample.control.flip": 1})
    mirrored.scores = [[mirrored.score(params, seed)] for seed, params in enumerate(recorded.params)]
    mirrored.marks = [args.steps]
    return mirrored


if __name__ == "__main__":
    main()
