"""Images with labels, parts or keypoints: procedural creatures, or files of real ones.

    python -m experiments.features.labelled cifar10_train.npz --side=32 --out=photos32.npz

writes the images of such a file (`images_pd`, planes of deltas) as configs/creatures.py:photos reads them. Beside the
images a file may have `labels`, a class per image; `masks` (packed bits) or `trimap` (1 to 3), a class per pixel;
`keypoints` [n k 3] as x, y in [0, 1] and whether they are visible.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.common.photos import from_deltas
from jaxdiff import data


class Labelled(NamedTuple):
    """What a set does not have is None. Points are (x, y) in pixels, boxes (x0, y0, x1, y1)."""

    images: np.ndarray
    labels: np.ndarray | None = None
    masks: np.ndarray | None = None  # a class for every pixel
    points: np.ndarray | None = None
    seen: np.ndarray | None = None
    boxes: np.ndarray | None = None

    @property
    def classes(self) -> int:
        return int(self.masks.max()) + 1


def get(path: str, count: int, side: int) -> Labelled:
    """`count` images of a file, or new creatures for the path ""."""
    return read(path, count, side) if path else creatures(count, side)


def creatures(count: int, side: int) -> Labelled:
    made = data.creature_set(count, side, draw=1)
    seen = np.ones(made.keypoints.shape[:2], bool)
    return Labelled(made.images, made.labels, made.parts, made.keypoints, seen, made.boxes)


def read(path: str, count: int, side: int) -> Labelled:
    """The first `count` images in a fixed random order, 0 for all, shrunk to `side`."""
    if not Path(path).is_file():
        raise SystemExit(f"no file {path}")
    with np.load(path, allow_pickle=False) as stored:
        total = stored["images_pd"].shape[1]
        if count > total:
            raise SystemExit(f"{path} has {total} images, {count} are needed: choose fewer by --test or --count")
        rows = np.random.default_rng(0).permutation(total)[: count or total]
        images = shrunk(from_deltas(stored["images_pd"][:, rows]), side) / 127.5 - 1
        found = {"labels": stored["labels"][rows]} if "labels" in stored else {}
        if "masks" in stored:
            bits = np.unpackbits(stored["masks"][rows], axis=-1)
            found["masks"] = shrunk(bits.reshape(len(rows), *stored["images_pd"].shape[2:]), side) > 0.5
        if "trimap" in stored:  # its borders, 3, are left to the animal
            found["masks"] = shrunk(stored["trimap"][rows] != 2, side) > 0.5
        if "keypoints" in stored:
            found["points"] = stored["keypoints"][rows, :, :2] * side - 0.5
            found["seen"] = stored["keypoints"][rows, :, 2] > 0
            found["boxes"] = around(found["points"], found["seen"])
    if "masks" in found:
        found["masks"] = found["masks"].astype(np.uint8)
    return Labelled(images.astype(np.float32), **found)


def shrunk(a: np.ndarray, side: int) -> np.ndarray:
    """Means over squares of pixels."""
    if a.shape[1] % side or a.shape[2] % side:
        raise SystemExit(f"images of {a.shape[1]}x{a.shape[2]} cannot be shrunk to {side}x{side}: choose a divisor")
    return a.reshape(len(a), side, a.shape[1] // side, side, -1, *a.shape[3:]).mean((2, 4), dtype=np.float32)


def around(points: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Boxes around the visible points."""
    low = np.where(seen[..., None], points, np.inf).min(1)
    high = np.where(seen[..., None], points, -np.inf).max(1)
    return np.concatenate([low, high], -1)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("file")
    p.add_argument("--side", type=int, default=32)
    p.add_argument("--count", type=int, default=0, help="0 = all")
    p.add_argument("--out", default="photos32.npz")
    args = p.parse_args()
    found = read(args.file, args.count, args.side)
    images = np.round((found.images + 1) * 127.5).astype(np.uint8)
    np.savez(args.out, images=images)
    print(f"wrote {len(images)} images of {args.side}x{args.side} to {args.out}")


if __name__ == "__main__":
    main()
