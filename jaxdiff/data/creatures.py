"""Procedural creatures: images with ground-truth parts, keypoints, boxes and species.

A creature has a body, a head, legs and a tail of one colour, so that parts differ only in shape and position. Species
differ in the number of legs (2 or 4) and the body (round or long). It faces left or right on a smooth background.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxdiff.data.examples import Source
from jaxdiff.data.memory import in_memory

PARTS = ("background", "body", "legs", "tail", "head")
KEYPOINTS = ("head", "body", "tail base", "tail tip", "front foot", "hind foot")
SPECIES = ("round biped", "round quadruped", "long biped", "long quadruped")
SAMPLES = 2  # per pixel and direction, for antialiasing


class Creatures(NamedTuple):
    """Images in [-1, 1] with ground truth; points are (x, y) in pixels, pixel centres at integers."""

    images: np.ndarray  # float32 [n h w 3]
    labels: np.ndarray  # int32 [n], an index of SPECIES
    parts: np.ndarray  # uint8 [n h w], an index of PARTS
    keypoints: np.ndarray  # float32 [n 6 2], in the order of KEYPOINTS
    boxes: np.ndarray  # float32 [n 4]: left, top, right, bottom


def creature_set(count: int, size: int = 16, draw: int = 0) -> Creatures:
    """`count` creatures of size x size pixels; `draw` is the seed. Image i does not depend on count."""
    if count < 1 or size < 8:
        raise ValueError(f"creatures need count >= 1 and size >= 8 to have legs, got {count=}, {size=}")
    drawn = [_draw(np.random.default_rng((draw, i)), size) for i in range(count)]
    images, labels, parts, keypoints = (np.stack(column) for column in zip(*drawn, strict=True))
    return Creatures(images, labels.astype(np.int32), parts, keypoints, _boxes(parts))


def creatures(count: int = 3000, size: int = 16, draw: int = 0) -> Source:
    """The images and species as a data source; `creature_set` also has the ground truth."""
    made = creature_set(count, size, draw)
    return in_memory("creatures", made.images, made.labels, class_names=SPECIES)


def _draw(rng: np.random.Generator, size: int) -> tuple[np.ndarray, int, np.ndarray, np.ndarray]:
    """Image, species, parts and keypoints of one creature."""
    species = int(rng.integers(4))
    shapes, points = _skeleton(rng, long=species >= 2, legs=2 if species % 2 == 0 else 4)
    scale = size * rng.uniform(0.85, 1.05)
    centre = size / 2 - 0.5 + size * rng.uniform(-0.06, 0.06, 2)
    mirror = np.array([rng.choice([-1.0, 1.0]), 1.0])
    fine = _grid(size, SAMPLES)
    covered = _paint(shapes, (fine - centre) / (scale * mirror)) > 0
    share = covered.reshape(size, SAMPLES, size, SAMPLES).mean((1, 3))[..., None]
    colour, background = rng.uniform(-1, 1, 3), rng.uniform(-1, 1, 3)
    while np.abs(colour - background).max() < 0.8:  # keep creatures visible
        colour = rng.uniform(-1, 1, 3)
    slope = _grid(size, 1) / size @ rng.uniform(-0.4, 0.4, (2, 3))
    image = np.clip(share * colour + (1 - share) * (background + slope), -1, 1)
    parts = _paint(shapes, (_grid(size, 1) - centre) / (scale * mirror))
    return image.astype(np.float32), species, parts, (points * mirror * scale + centre).astype(np.float32)


def _grid(size: int, samples: int) -> np.ndarray:
    """Points (x, y) [h w 2], `samples` in each direction of a pixel."""
    axis = (np.arange(size * samples) + 0.5) / samples - 0.5
    return np.stack(np.meshgrid(axis, axis), -1)


def _skeleton(rng: np.random.Generator, long: bool, legs: int) -> tuple[list[tuple], np.ndarray]:
    """Shapes (part, end, other end, radii) in painting order, and keypoints, around the origin, y down."""
    half, thick = (0.24, 0.09) if long else (0.16, 0.13)
    half, thick = half * rng.uniform(0.9, 1.1), thick * rng.uniform(0.9, 1.1)
    body = np.array([0.0, 0.02])
    foot = 0.36 + rng.uniform(-0.03, 0.03)
    places = np.array([-0.75, 0.75] if legs == 2 else [-0.85, -0.4, 0.4, 0.85]) * half
    shapes: list[tuple] = [(2, (x, body[1]), (x, foot), 0.035) for x in places]
    base = body + [-0.85 * half, -0.3 * thick]
    angle, length = rng.uniform(0.1, 1.2), rng.uniform(0.16, 0.22)
    tip = base + length * np.array([-np.cos(angle), -np.sin(angle)])
    head = body + [0.9 * half, -thick - rng.uniform(0.04, 0.09)]
    shapes += [(3, base, tip, 0.035), (1, body, body, (half, thick)), (4, head, head, rng.uniform(0.085, 0.11))]
    return shapes, np.array([head, body, base, tip, (places[-1], foot), (places[0], foot)])


def _paint(shapes: list[tuple], points: np.ndarray) -> np.ndarray:
    """The part at each point: capsules between two ends, ellipses where the ends are one."""
    parts = np.zeros(points.shape[:2], np.uint8)
    for part, start, end, radii in shapes:
        along = np.asarray(end, float) - start
        share = np.clip((points - start) @ along / max(along @ along, 1e-12), 0, 1)
        offset = (points - start - share[..., None] * along) / radii
        parts[np.square(offset).sum(-1) <= 1] = part
    return parts


def _boxes(parts: np.ndarray) -> np.ndarray:
    """The smallest box [left, top, right, bottom] around each creature's pixels, edges included."""
    columns, rows = (parts > 0).any(1), (parts > 0).any(2)
    first = lambda a: a.argmax(1)  # noqa: E731
    last = lambda a: a.shape[1] - 1 - a[:, ::-1].argmax(1)  # noqa: E731
    return np.stack([first(columns), first(rows), last(columns), last(rows)], -1).astype(np.float32)
