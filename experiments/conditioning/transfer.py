"""Training at 16x16 from a network trained at 8x8, and from scratch: caption scores by steps at 16x16.

    python experiments/conditioning/transfer.py [--study=transfer] [--steps=480] [--seeds=3] [--out=runs/experiments]

--study=transfer   scratch; transferred with noise and positions rescaled, for as many steps and for half of them
--study=positions  positions interpolated, extrapolated, bicubic (Figure 7 of the paper, left)
--study=schedule   noise levels rescaled or not (middle)
--study=crops      8x8 pictures made by resizing, as windows of the large ones, or both (right)

The small network sees half as many tokens a side; its training (--before steps) is not counted, a step of it costs a
quarter. All variants of a seed see the same pictures, levels and initial parameters; `loss` is the mean over the steps
since the last mark.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
from study import PATCH, SIZE, Variant, chosen, parse, parser, report

from jaxdiff.trees import by_name

LARGE = {"data.options.size": 2 * SIZE}
RESCALED = {**LARGE, "noise.shift": 2.0, "model.fields.grid": SIZE // PATCH}
SMALL = {**LARGE, "data.options.image_size": SIZE, "data.options.crop": "global"}
# variant: crop of the first training ("" = none), changes of the second, and what its steps are divided by
STUDIES: dict[str, dict[str, tuple[Any, ...]]] = {
    "transfer": {
        "scratch": ("", {**LARGE, "noise.shift": 2.0}),
        "transfer": ("global", RESCALED),
        "half the steps": ("global", RESCALED, 2),
    },
    "positions": {
        kind: ("global", {**RESCALED, "model.fields.positions": kind})
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
    p = parser(__doc__, steps=480)
    p.add_argument("--study", choices=STUDIES, default="transfer")
    p.add_argument("--before", type=int, default=800, help="steps at 8x8")
    args = parse(p)
    before = 2 if args.tiny else args.before
    starts: dict[str, list[Any]] = {"": []}
    runs = {}
    for name in chosen(args, STUDIES[args.study]):
        crop, changes, share = (*STUDIES[args.study][name], 1)[:3]
        if crop not in starts:
            small = Variant(args, {**SMALL, "data.options.crop": crop}, steps=before)
            found = [small.train(seed) for seed in range(args.seeds)]
            starts[crop] = [by_name(jax.device_get(state.ema)) for state in found]
            print(f"at {SIZE}x{SIZE}, crop {crop}: {small.score(found[0], 0)}", flush=True)
        runs[name] = Variant(args, changes, steps=args.steps // share).run(name, starts[crop])
    report(args, args.study, CLAIMS[args.study], runs, "caption")
    if {"scratch", "transfer"} <= set(runs):
        for key, better in (("loss", operator.le), ("shape", operator.ge), ("caption", operator.ge)):
            first = reached(runs["transfer"], [seed[-1][key] for seed in runs["scratch"].scores], key, better)
            print(f"scratch's last {key} is reached after {first} of {runs['scratch'].marks[-1]} steps")


def reached(run: Variant, wanted: list[float], key: str, better: Callable[[float, float], bool]) -> list[int | None]:
    """The first mark of each seed at which the score is as good as wanted."""
    return [
        next((mark for mark, scores in zip(run.marks, curve, strict=True) if better(scores[key], goal)), None)
        for curve, goal in zip(run.scores, wanted, strict=True)
    ]


if __name__ == "__main__":
    main()
