"""Size conditioning: constant weight or the power-cosine of time with several alpha, and which size to sample with.

    python -m experiments.conditioning.control [--steps=600] [--seeds=3] [--out=runs/experiments]

Images were drawn at 8x8 or at 32x32 and resized to 16x16, so the size says how sharp an image is and nothing about what
it shows. Seed, noise and prompt stay while the size that samples are conditioned on changes: `content` is the root mean
square change of their 4x4 averages and `detail` that of the rest, between the smallest and the largest size; `kept` is
the share of samples that still show the same things. Rows of the last table are the sizes of samples.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from experiments.common.tables import cell, show
from experiments.conditioning.variant import PATCH, SIZE, Variant, chosen, parse, parser, report
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


def sampled_at(args: Any, curve: dict[str, Any], size: int) -> Variant:
    """The variant whose samples are conditioned on this size."""
    changes = {**DATA, "model.fields.control": {"keys": ("original_size",), **curve}}
    return Variant(args, {**changes, "sample.control.original_size": (size, size)})


def pooled(images: np.ndarray) -> np.ndarray:
    """4x4 averages, spread over their pixels."""
    n, h, w, c = images.shape
    means = images.reshape(n, h // PATCH, PATCH, w // PATCH, PATCH, c).mean((2, 4))
    return means.repeat(PATCH, 1).repeat(PATCH, 2)


def change(one: np.ndarray, other: np.ndarray) -> dict[str, float]:
    """How much two sets of samples differ that are alike but for the size they are conditioned on."""
    content = pooled(one) - pooled(other)
    return {
        "content": float(np.sqrt(np.mean(content**2))),
        "detail": float(np.sqrt(np.mean((one - other - content) ** 2))),
        "kept": float((read_shapes(one) == read_shapes(other)).all(1).mean()),
    }


def main() -> None:
    args = parse(parser(__doc__, steps=600))
    variants, moved, by_size = {}, {}, {}
    for name in chosen(args, CURVES):
        curve = CURVES[name]
        variants[name] = sampled_at(args, curve, SIZES[-1]).train_all(name)
        drawn: dict[int, list[Any]] = {}
        for size in SIZES:
            variant = variants[name] if size == SIZES[-1] else sampled_at(args, curve, size)
            drawn[size] = [variant.images(params, seed) for seed, params in enumerate(variants[name].params)]
            scores = [caption_scores(images, variant.drawn[1])["caption"] for images in drawn[size]]
            by_size.setdefault(size, []).append(scores)
        moved[name] = [change(*pair) for pair in zip(drawn[SIZES[0]], drawn[SIZES[-1]], strict=True)]
    report(args, "control", CLAIM, variants, "caption", moved=moved, by_size=by_size)
    keys = list(next(iter(moved.values()))[0])
    rows = [[name, *(cell([seed[key] for seed in found]) for key in keys)] for name, found in moved.items()]
    show(f"samples of size {SIZES[0]} and {SIZES[-1]}: how much changes", ["", *keys], rows)
    rows = [[str(size), *(cell(scores) for scores in found)] for size, found in by_size.items()]
    show("caption score by the size that samples are conditioned on", ["", *variants], rows)


if __name__ == "__main__":
    main()
