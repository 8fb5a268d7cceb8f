"""Left and right when pictures are mirrored half the time: flips told to the network, kept from it, or not made.

    python experiments/conditioning/flips.py [--steps=2000] [--seeds=3] [--out=runs/experiments]

left_right is the share of samples that look more like their caption than like it with left and right exchanged.
Networks that are told of flips are asked for pictures without.
"""

from __future__ import annotations

from study import Variant, parse, parser, report

FLIPS = {"data.options.flip": True}
VARIANTS = {
    "recorded": {**FLIPS, "data.options.control": ("flip",), "model.fields.control": {"keys": ("flip",)}},
    "not recorded": FLIPS,
    "no flips": {},
}
CLAIM = "prompts with left and right are obeyed only with flip conditioning; here: at least 95 %, else about half"


def main() -> None:
    args = parse(parser(__doc__, steps=2000))
    curves, marks = {}, {}
    for name, changes in VARIANTS.items():
        variant = Variant(args, changes)
        print(f"{name}:", flush=True)
        curves[name], marks[name] = variant.curves(), variant.marks
    report(args, "flips", CLAIM, curves, marks, "left_right")


if __name__ == "__main__":
    main()
