"""Damage to images, uint8 [n h w c], each of a strength; what training draws and what the ladder measures."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
from PIL import Image
from scipy import ndimage


def noise(images: np.ndarray, strength: float, rng: np.random.Generator) -> np.ndarray:
    """Gaussian noise; strength is its standard deviation in units of the range of a pixel."""
    return _to_uint8(images + 255 * strength * rng.standard_normal(images.shape, np.float32))


def blur(images: np.ndarray, strength: float, rng: np.random.Generator) -> np.ndarray:
    """A Gaussian filter; strength is its width in pixels."""
    return _to_uint8(ndimage.gaussian_filter(images.astype(np.float32), (0, strength, strength, 0)))


def pixelate(images: np.ndarray, strength: float, rng: np.random.Generator) -> np.ndarray:
    """Blocks of `strength` pixels become their mean."""
    n, h, w, c = images.shape
    k = int(strength)
    means = images.reshape(n, h // k, k, w // k, k, c).mean((2, 4))
    return _to_uint8(means.repeat(k, 1).repeat(k, 2))


def jpeg(images: np.ndarray, strength: float, rng: np.random.Generator) -> np.ndarray:
    """Compression; strength is 100 minus the quality."""
    out = []
    for image in images:
        file = io.BytesIO()
        Image.fromarray(image).save(file, "jpeg", quality=100 - int(strength))
        out.append(np.asarray(Image.open(file)))
    return np.stack(out)


def contrast(images: np.ndarray, strength: float, rng: np.random.Generator) -> np.ndarray:
    """Towards the mean of each image; 0 changes nothing, 1 leaves the mean alone."""
    means = images.mean((1, 2, 3), keepdims=True)
    return _to_uint8(means + (1 - strength) * (images - means))


def grey(images: np.ndarray, strength: float, rng: np.random.Generator) -> np.ndarray:
    """Towards the mean of the channels."""
    means = images.mean(-1, keepdims=True)
    return _to_uint8(means + (1 - strength) * (images - means))


def mix(images: np.ndarray, strength: float, rng: np.random.Generator) -> np.ndarray:
    """Each image over another one, which has the weight `strength`."""
    return _to_uint8((1 - strength) * images + strength * images[rng.permutation(len(images))])


def shuffle(images: np.ndarray, strength: float, rng: np.random.Generator) -> np.ndarray:
    """Patches of `strength` pixels in random order, another for each image."""
    n, h, w, c = images.shape
    k = int(strength)
    patches = images.reshape(n, h // k, k, w // k, k, c).swapaxes(2, 3).reshape(n, -1, k, k, c)
    order = rng.random(patches.shape[:2]).argsort(1)
    patches = patches[np.arange(n)[:, None], order]
    return patches.reshape(n, h // k, w // k, k, k, c).swapaxes(2, 3).reshape(n, h, w, c)


def salt(images: np.ndarray, strength: float, rng: np.random.Generator) -> np.ndarray:
    """A share of the pixels becomes black or white. Not in training: the ladder alone uses it."""
    hit, value = rng.random(images.shape[:3]) < strength, rng.integers(2, size=images.shape[:3], dtype=np.uint8)
    return np.where(hit[..., None], 255 * value[..., None], images)


def components(images: np.ndarray, strength: float, rng: np.random.Generator) -> np.ndarray:
    """What `strength` principal components of the pixels keep. Not in training."""
    x = images.reshape(len(images), -1).astype(np.float32)
    mean = x.mean(0)
    _, _, rows = np.linalg.svd(x - mean, full_matrices=False)
    rows = rows[: int(strength)]
    return _to_uint8(mean + (x - mean) @ rows.T @ rows).reshape(images.shape)


Damage = Callable[[np.ndarray, float, np.random.Generator], np.ndarray]
TRAINING: dict[str, tuple[Damage, tuple[float, ...]]] = {
    "noise": (noise, (0.02, 0.05, 0.1, 0.2)),
    "blur": (blur, (0.5, 0.8, 1.2, 2.0)),
    "pixelate": (pixelate, (2, 4)),
    "jpeg": (jpeg, (60, 80, 90)),
    "contrast": (contrast, (0.3, 0.6)),
    "grey": (grey, (0.5, 1.0)),
    "mix": (mix, (0.2, 0.5)),
    "shuffle": (shuffle, (4, 8, 16)),
}


def drawn(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Equal shares of the images under each damage of TRAINING at each of its strengths, in order."""
    cases = [(damage, strength) for damage, strengths in TRAINING.values() for strength in strengths]
    parts = np.array_split(images, len(cases))
    return np.concatenate([damage(part, s, rng) for part, (damage, s) in zip(parts, cases, strict=True)])


def _to_uint8(images: np.ndarray) -> np.ndarray:
    return images.round().clip(0, 255).astype(np.uint8)
