"""Small colour images for studies of noise: CIFAR-10 where its file is found, random ones otherwise."""

from __future__ import annotations

from pathlib import Path

import numpy as np

CIFAR = Path(__file__).resolve().parents[3] / "shared" / "data" / "cifar10_test.npz"


def from_deltas(deltas: np.ndarray) -> np.ndarray:
    """Images [n h w 3] from planes [3 n h w] of deltas: their sums are green, red minus green, blue minus green."""
    green, red, blue = deltas.cumsum(2, np.uint8).cumsum(3, np.uint8)
    return np.stack([red + green, green, blue + green], -1)


def load(path: Path, rng: np.random.Generator) -> tuple[np.ndarray, str]:
    """Up to 4,096 images [n, 3072] in [-1, 1], and where they come from."""
    if path.exists():
        images = from_deltas(np.load(path)["images_pd"][:, :4096])
        return (images.reshape(len(images), -1) / 127.5 - 1).astype(np.float32), path.name
    frequency = np.hypot(np.fft.fftfreq(32)[:, None], np.fft.fftfreq(32))
    frequency[0, 0] = 1 / 32
    smooth = np.fft.ifft2(np.fft.fft2(rng.normal(size=(4096, 3, 32, 32))) / frequency).real
    return (0.5 * smooth / smooth.std()).astype(np.float32).reshape(4096, -1), f"random (no {path.name})"
