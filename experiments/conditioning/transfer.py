"""Training at 16x16 from a network trained at 8x8, and from scratch: loss and caption scores by steps at 16x16.

    python -m experiments.conditioning.transfer [--study transfer positions] [--steps=400] [--seeds=3]

transfer   scratch; transferred, with noise and positions rescaled
positions  interpolated, extrapolated, bicubic (Figure 7 of the paper, left)
schedule   noise levels rescaled or not (middle); the loss is then one of other levels and cannot be compared
crops      8x8 images made by resizing, as windows of the large ones, or both (right)

The learning rate is constant, as in the paper, so a mark at half of the steps is a training of half as many. The small
network sees half as many tokens per side; its training (--before steps) is not counted. What studies have in common is
trained once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax

from experiments.conditioning.variant import SIZE, Variant, chosen, parse, parser, report
from jaxdiff.methods import exported
from jaxdiff.trees import by_name

PATCH = 2  # things span several tokens at either size; with patches of 4, at 8x8, they hardly do
BOTH = {"data.options.size": 2 * SIZE, "model.fields.patch": PATCH}
SMALL = {**BOTH, "data.options.image_size": SIZE}
LARGE = {**BOTH, "noise.shift": 2.0, "optim.decay": "constant"}
RESCALED = {**LARGE, "model.fields.grid": SIZE // PATCH}
# variant: crop of the first training ("" = none), changes of the second
STUDIES: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "transfer": {"scratch": ("", LARGE), "transfer": ("global", RESCALED)},
    "positions": {
        kind: ("global", {**RESCALED, **({} if kind == "interpolate" else {"model.fields.positions": kind})})
        for kind in ("interpolate", "extrapolate", "bicubic")
    },
    "schedule": {"rescaled": ("global", RESCALED), "as it was": ("global", {**RESCALED, "noise.shift": 1.0})},
    "crops": {crop: (crop, RESCALED) for crop in ("global", "local", "mixed")},
}
CLAIMS = {
    "transfer": "transfer is better than scratch at an equal budget; here: as good in at most half the steps",
    "positions": "interpolated positions converge faster than extrapolated ones",
    "schedule": "rescaled noise converges faster",
    "crops": "a trade-off; which is best was not recovered",
}


def main() -> None:
    p = parser(__doc__, steps=400)
    p.add_argument("--study", choices=STUDIES, nargs="+", default=["transfer"])
    p.add_argument("--before", type=int, default=1500, help="steps at 8x8")
    args = parse(p)
    starts: dict[str, list[Any]] = {"": []}
    trained: dict[str, Variant] = {}
    for study in args.study:
        variants: dict[str, Variant] = {}
        for name in chosen(args, STUDIES[study]):
            crop, changes = STUDIES[study][name]
            if crop not in starts:
                starts[crop] = first(args, crop)
            same = f"{crop} {changes}"
            if same not in trained:
                trained[same] = Variant(args, changes).train_all(name, starts[crop])
            variants[name] = trained[same]
        report(args, study, CLAIMS[study], variants, "caption" if study == "schedule" else "loss")
        if {"scratch", "transfer"} <= set(variants):
            for key, better in (("loss", operator.le), ("shape", operator.ge), ("caption", operator.ge)):
                scratch, goal = variants["scratch"], [seed[-1][key] for seed in variants["scratch"].scores]
                first_at = reached(variants["transfer"], goal, key, better)
                print(f"scratch's last {key} is reached after {first_at} of {scratch.marks[-1]} steps")


def first(args: Any, crop: str) -> list[dict[str, Any]]:
    """Averaged parameters by name of the training at 8x8, by seed."""
    small = Variant(args, {**SMALL, "data.options.crop": crop}, steps=2 if args.tiny else args.before)
    params = [exported(small.train(seed)) for seed in range(args.seeds)]
    print(f"at {SIZE}x{SIZE}, crop {crop}: {small.score(params[0], 0)}", flush=True)
    return [by_name(jax.device_get(tree)) for tree in params]


def reached(
    variant: Variant, wanted: list[float], key: str, better: Callable[[float, float], bool]
) -> list[int | None]:
    """The first mark of each seed at which the score is as good as wanted."""
    return [
        next((mark for mark, scores in zip(variant.marks, curve, strict=True) if better(scores[key], goal)), None)
        for curve, goal in zip(variant.scores, wanted, strict=True)
    ]


if __name__ == "__main__":
    main()
