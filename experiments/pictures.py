"""Small colour images for studies of noise: CIFAR-10 where its file is found, random ones otherwise."""

from pathlib import Path

import numpy as np

CIFAR = Path(__file__).resolve().parents[2] / "shared" / "data" / "cifar10_test.npz"


def load(path: Path, rng: np.random.Generator) -> tuple[np.ndarray, str]:
    """Images [n, 3072] in [-1, 1]."""
    if path.exists():
        planes = np.load(path)["images_pd"][:, :4096].cumsum(2, dtype=np.uint8).cumsum(3, dtype=np.uint8)
        colours = np.stack([planes[1] + planes[0], planes[0], planes[2] + planes[0]], -1)
        return (colours.reshape(len(colours), -1) / 127.5 - 1).astype(np.float32), path.name
    frequency = np.hypot(np.fft.fftfreq(32)[:, None], np.fft.fftfreq(32))
    frequency[0, 0] = 1 / 32
    smooth = np.fft.ifft2(np.fft.fft2(rng.normal(size=(4096, 3, 32, 32))) / frequency).real
    return (0.5 * smooth / smooth.std()).astype(np.float32).reshape(4096, -1), f"random (no {path})"
