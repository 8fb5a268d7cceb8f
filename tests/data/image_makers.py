"""Small images and folders of them for the data tests."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image


def random_image(seed: int, height: int = 12, width: int = 16, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)


def saved(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def encoded(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    return saved(Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels), kind)


def make_folder(root: Path, names: list[str], **shape: int) -> Path:
    """PNG files `names` below root; the image of names[i] is random_image(i)."""
    for seed, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(encoded(random_image(seed, **shape)))
    return root


def same(one: dict, other: dict) -> bool:
    """Whether two batches agree bit for bit."""
    return one.keys() == other.keys() and all(np.array_equal(one[key], other[key]) for key in one)


def joined(batches: list[dict]) -> dict:
    return {key: np.concatenate([batch[key] for batch in batches]) for key in batches[0]}
