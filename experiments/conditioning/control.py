"""Size conditioning: constant weight or the power-cosine of time with several alpha, and which size to ask for.

    python experiments/conditioning/control.py [--steps=600] [--seeds=3] [--out=runs/experiments]

Pictures were drawn at 8x8 or at 32x32 and resized to 16x16, so the size says how sharp a picture is and nothing of what
it shows. Seed, noise and prompt stay while the size that samples are told changes: `content` is the root mean square
change of their 4x4 averages and `detail` that of what is left, between the smallest and the largest size; `kept` is the
share of samples that still show the same things. Rows of the last table are the sizes asked for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from lab import cell, show
from study import PATCH, SIZE, Variant, chosen, parse, parser, report

from jaxdiff.data import caption_scores, read_shapes

SIZES = (SIZE, 2 * SIZE, 4 * SIZE)
DATA = {
    "data.options.size": (SIZES[0], SIZES[-1]),
    "data.options.image_size": 2 * SIZE,
    "data.options.crop": "global",
    "data.options.control": ("original_size",),
    "noise.shift": 2.0,
}
CURVES: dict[str, dict[str, Any]] = {
    "constant": {"gamma": "constant"},
    **{f"alpha {alpha}": {"alpha": float(alpha)} for alpha in (1, 2, 4, 8)},
}
CLAIM = "with a constant weight content changes with the size; with the cosine less, at equal or better quality"


def told(args: Any, curve: dict[str, Any], size: int) -> Variant:
    """The variant whose samples are told this size."""
    changes = {**DATA, "model.fields.control": {"keys": ("original_size",), **curve}}
    return Variant(args, {**changes, "sample.control.original_size": (size, size)})


def pooled(images: np.ndarray) -> np.ndarray:
    """4x4 averages, spread over their pixels."""
    n, h, w, c = images.shape
    means = images.reshape(n, h // PATCH, PATCH, w // PATCH, PATCH, c).mean((2, 4))
    return means.repeat(PATCH, 1).repeat(PATCH, 2)


def change(one: np.ndarray, other: np.ndarray) -> dict[str, float]:
    """How much two sets of samples, alike but for what they were told, differ."""
    content = pooled(one) - pooled(other)
    return {
        "content": float(np.sqrt(np.mean(content**2))),
        "detail": float(np.sqrt(np.mean((one - other - content) ** 2))),
        "kept": float((read_shapes(one) == read_shapes(other)).all(1).mean()),
    }


def main() -> None:
    args = parse(parser(__doc__, steps=600))
    runs, moved, asked = {}, {}, {}
    for name in chosen(args, CURVES):
        curve = CURVES[name]
        runs[name] = told(args, curve, SIZES[-1]).run(name)
        drawn: dict[int, list[Any]] = {}
        for size in SIZES:
            variant = runs[name] if size == SIZES[-1] else told(args, curve, size)
            drawn[size] = [variant.images(state, seed) for seed, state in enumerate(runs[name].states)]
            scores = [caption_scores(images, variant.drawn[1])["caption"] for images in drawn[size]]
            asked.setdefault(size, []).append(scores)
        moved[name] = [change(*pair) for pair in zip(drawn[SIZES[0]], drawn[SIZES[-1]], strict=True)]
    report(args, "control", CLAIM, runs, "caption", moved=moved, asked=asked)
    keys = list(next(iter(moved.values()))[0])
    rows = [[name, *(cell([seed[key] for seed in found]) for key in keys)] for name, found in moved.items()]
    show(f"samples told {SIZES[0]} and {SIZES[-1]}: how much changes", ["", *keys], rows)
    rows = [[str(size), *(cell(scores) for scores in found)] for size, found in asked.items()]
    show("caption score by the size that samples are told", ["", *runs], rows)


if __name__ == "__main__":
    main()
