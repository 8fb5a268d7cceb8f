"""Procedural captioned images: two coloured shapes side by side, "a red circle left of a blue square".

The contents of an image are recovered by matching it against every possible drawing, so `caption_scores` measures how
well samples match their captions without a network.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Int

from jaxdiff.data.examples import Source
from jaxdiff.data.memory import in_memory

COLOURS = {"red": (1, -1, -1), "green": (-1, 1, -1), "blue": (-1, -1, 1), "yellow": (1, 1, -1)}
SHAPES = ("circle", "square", "triangle")
THINGS = tuple(f"{colour} {shape}" for colour in COLOURS for shape in SHAPES)  # thing = colour * len(SHAPES) + shape
PAIRS = tuple(itertools.permutations(range(len(THINGS)), 2))  # (left, right), never alike
CAPTIONS = tuple(
    caption
    for left, right in PAIRS
    for caption in (f"a {THINGS[left]} left of a {THINGS[right]}", f"a {THINGS[right]} right of a {THINGS[left]}")
)
WORDINGS = ("left", "right")
RADII = (0.15, 0.18)  # of the image's side
SHIFTS = tuple(itertools.product((-2 / 32, 0.0, 2 / 32), (-1 / 32, 0.0, 1 / 32)))  # of the centre, down and right
SAMPLES = 4  # per pixel and direction, for antialiasing


class Shapes(NamedTuple):
    """Images and their contents; captions 2 pair and 2 pair + 1 both describe PAIRS[pair]."""

    images: list[np.ndarray]  # uint8 [h w 3]
    pairs: np.ndarray  # int32 [n], an index of PAIRS
    captions: np.ndarray  # int32 [n], an index of CAPTIONS


def shape_set(
    count: int,
    size: int | Sequence[int] = 32,
    draw: int = 0,
    wordings: Sequence[str] = WORDINGS,
    things: Sequence[str] = THINGS,
) -> Shapes:
    """`count` images of size x size pixels, or of several in turn; image i depends on (draw, i) and the rest.

    Captions say "left of" or "right of", with the frequencies of `wordings`; images show two of `things`, all or
    some of THINGS.
    """
    sizes = (size,) if isinstance(size, int) else tuple(size)
    if count < 1 or not sizes or any(side < 8 or side % 2 for side in sizes):
        raise ValueError(f"shapes need count >= 1 and even sizes of 8 pixels or more, got {count=}, {size=}")
    if not wordings or not set(wordings) <= set(WORDINGS):
        raise ValueError(f"wordings of shapes are some of {', '.join(WORDINGS)}, got {wordings!r}")
    if len(set(things)) < 2 or not set(things) <= set(THINGS):
        raise ValueError(f"shapes need two things or more of {', '.join(THINGS)}, got {things!r}")
    drawn = [i for i, pair in enumerate(PAIRS) if all(THINGS[thing] in things for thing in pair)]
    images, pairs, captions = [], [], []
    for i in range(count):
        rng = np.random.default_rng((draw, i))
        pair, wording = drawn[int(rng.integers(len(drawn)))], wordings[int(rng.integers(len(wordings)))]
        images.append(_paint(PAIRS[pair], sizes[i % len(sizes)], rng))
        pairs.append(pair)
        captions.append(2 * pair + WORDINGS.index(wording))
    return Shapes(images, np.asarray(pairs, np.int32), np.asarray(captions, np.int32))


def shapes(
    count: int = 4000,
    size: int | Sequence[int] = 32,
    draw: int = 0,
    wordings: Sequence[str] = WORDINGS,
    things: Sequence[str] = THINGS,
) -> Source:
    """The images of `shape_set` with captions, and with the pair as a label; several sizes need image_size=."""
    made = shape_set(count, size, draw, wordings, things)
    alike = len({image.shape for image in made.images}) == 1
    images = np.stack(made.images) if alike else np.zeros((count, 1, 1, 3), np.uint8)
    source = in_memory(
        "shapes", images, made.pairs, class_names=CAPTIONS[::2], caption_ids=made.captions, captions=CAPTIONS
    )
    if not alike:
        columns: dict[str, Sequence | np.ndarray] = {**source.arrays, "image": made.images}
        mark = f"{source.fingerprint} {size} {draw}"
        source = source._replace(read=lambda i: {k: v[i] for k, v in columns.items()}, arrays={}, fingerprint=mark)
    return source._replace(judge=caption_scores)


def _paint(pair: tuple[int, int], size: int, rng: np.random.Generator) -> np.ndarray:
    ground = rng.uniform(-0.3, 0.3)
    image = np.full((size, size, 3), ground)
    for side, thing in enumerate(pair):
        colour, shape = divmod(thing, len(SHAPES))
        places = _masks(size)[shape]
        mask = places[rng.integers(len(places))][..., None]
        half = image[:, side * size // 2 : (side + 1) * size // 2]
        half += mask * (np.asarray(list(COLOURS.values())[colour]) - ground)
    return np.rint((image + 1) * 127.5).astype(np.uint8)


@functools.lru_cache(maxsize=8)
def _masks(size: int) -> Float[np.ndarray, "shapes places h w"]:
    """Every way to draw each shape in half an image: its coverage of each pixel."""
    fine = (np.arange(size * SAMPLES) + 0.5) / (size * SAMPLES)
    y, x = fine[:, None] - 0.5, fine[None, : size * SAMPLES // 2] - 0.25
    drawn = [
        [_covers(shape, (y - down) / radius, (x - right) / radius) for radius in RADII for down, right in SHIFTS]
        for shape in SHAPES
    ]
    return np.asarray(drawn, float).reshape(len(SHAPES), -1, size, SAMPLES, size // 2, SAMPLES).mean((3, 5))


def _covers(shape: str, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Whether points lie in the shape of radius 1."""
    if shape == "circle":
        return x**2 + y**2 <= 1
    if shape == "square":
        return np.maximum(np.abs(x), np.abs(y)) <= 0.9
    return (y <= 0.85) & (2 * np.abs(x) <= y + 1.15)


# ---------------------------------------------------------------------------------------------- reading


def read_shapes(images: Float32[np.ndarray, "n h w 3"]) -> Int[np.ndarray, "n 2"]:
    """The things on the left and right of images in [-1, 1]: the nearest drawing in squared distance.

    With u the half image less its background b, m a mask and c a colour, |u - m (c - b)|^2 is
    |u|^2 - 2 sum_k (c - b)_k <m, u_k> + |m|^2 |c - b|^2. The background is the median, shapes being small.
    """
    size = images.shape[1]
    masks = _masks(size).reshape(-1, size * size // 2)
    colours = np.asarray(list(COLOURS.values()), float)
    found = []
    for half in np.split(images.astype(float), 2, axis=2):
        pixels = half.reshape(len(half), -1, 3)
        ground = np.median(pixels, axis=1)
        overlap = np.einsum("mp,npk->nmk", masks, pixels - ground[:, None])
        contrast = colours - ground[:, None]  # [n c 3]
        cost = (masks**2).sum(1)[:, None] * (contrast**2).sum(-1)[:, None] - 2 * np.einsum(
            "nmk,nck->nmc", overlap, contrast
        )
        best = cost.reshape(len(half), len(SHAPES), -1, len(COLOURS)).min(2).reshape(len(half), -1).argmin(1)
        shape, colour = np.divmod(best, len(COLOURS))
        found.append(colour * len(SHAPES) + shape)
    return np.stack(found, axis=1)


def parse_caption(caption: str) -> tuple[int, int]:
    """The things on the left and on the right in a caption."""
    found = re.fullmatch(r"an? (\w+ \w+) (left|right) of an? (\w+ \w+)", caption.strip().lower())
    things = (found[1], found[3]) if found else ()
    if not found or any(thing not in THINGS for thing in things):
        raise ValueError(
            f"{caption!r} is not of the form 'a red circle left of a blue square', with the colours "
            f"{', '.join(COLOURS)} and the shapes {', '.join(SHAPES)}"
        )
    first, second = (THINGS.index(thing) for thing in things)
    return (first, second) if found[2] == "left" else (second, first)


def caption_scores(images: Float32[np.ndarray, "n h w 3"], captions: Sequence[str]) -> dict[str, float]:
    """Fractions of images that match their captions.

    `colour` and `shape`: of things with the right one in the right place; `caption`: of images with all
    four right; `left_right`: of images closer to their caption than to it with left and right swapped, ties counting
    half. Chance is 1/4, 1/3, 1/132 and 1/2.
    """
    seen, wanted = read_shapes(images), np.asarray([parse_caption(caption) for caption in captions])
    right = [np.stack([part(seen) == part(want) for part in (_colour, _shape)]) for want in (wanted, wanted[:, ::-1])]
    straight, crossed = (found.sum((0, 2)) for found in right)  # of 4
    order = np.where(straight == crossed, 0.5, straight > crossed)
    colour, shape = (float(found.mean()) for found in right[0])
    return {
        "colour": colour,
        "shape": shape,
        "caption": float((straight == 4).mean()),
        "left_right": float(order.mean()),
    }


def _colour(things: np.ndarray) -> np.ndarray:
    return things // len(SHAPES)


def _shape(things: np.ndarray) -> np.ndarray:
    return things % len(SHAPES)
