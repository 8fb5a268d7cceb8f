"""Resizing for feature networks. FID depends on the kind of resizing, so it is always named explicitly.

    bilinear    half-pixel centres, no antialiasing: torch's interpolate(align_corners=False), as in pytorch-fid
    clean       antialiased bicubic (a = -1/2): Pillow's BICUBIC on float channels, overshoot clipped, as in clean-fid
    tensorflow  bilinear with pixel i at i * in / out, no antialiasing: TF 1, as in the original FID, ADM and EDM

Each is one matrix for the rows and one for the columns.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxdiff.errors import pick


def as_float(images: ArrayLike) -> Float[Array, "b h w c"]:
    """Images [b h w c] in [-1, 1], float32: uint8 is rescaled, floats are kept."""
    images = jnp.asarray(images)
    if images.ndim != 4:
        raise ValueError(f"images must be [b, h, w, c] (NHWC), got shape {images.shape}")
    if images.dtype == jnp.uint8:
        return images.astype(jnp.float32) / 127.5 - 1
    if not jnp.issubdtype(images.dtype, jnp.floating):
        raise ValueError(f"images must be uint8 in 0..255 or floating in [-1, 1], got {images.dtype}")
    return images.astype(jnp.float32)


def as_rgb(images: ArrayLike) -> Float[Array, "b h w 3"]:
    """The same with three channels; grayscale is repeated."""
    images = as_float(images)
    if images.shape[-1] not in (1, 3):
        raise ValueError(
            f"feature networks take images with 1 or 3 channels, got {images.shape[-1]}; decode latents first"
        )
    return jnp.broadcast_to(images, (*images.shape[:-1], 3))


def resize(images: Float[Array, "b h w c"], side: int, kind: str) -> Float[Array, "b {side} {side} c"]:
    """Images [b side side c] of pixels in [-1, 1]; images that already have that size are returned unchanged."""
    rows, columns = (jnp.asarray(weights(size, side, kind), images.dtype) for size in images.shape[1:3])
    if images.shape[1:3] == (side, side):
        return images
    out = jnp.einsum("ih,jw,bhwc->bijc", rows, columns, images, precision=jax.lax.Precision.HIGHEST)
    return out.clip(-1, 1) if kind == "clean" else out  # bicubic overshoots; bilinear means do not


def weights(size: int, out: int, kind: str) -> np.ndarray:
    """The matrix [out, size] that resizes one axis; rows sum to 1."""
    rule = pick(RESIZERS, kind, "resize kind")
    scale = size / out
    half = 0.0 if kind == "tensorflow" else 0.5
    centres = (np.arange(out) + half) * scale - half
    if kind != "clean":
        centres = centres.clip(0, size - 1)  # outside the image, use the border pixel
    width = max(scale, 1.0) if kind == "clean" else 1.0
    table = rule(np.abs(centres[:, None] - np.arange(size)) / width)
    return table / table.sum(1, keepdims=True)


def _triangle(distance: np.ndarray) -> np.ndarray:
    return np.maximum(1 - distance, 0)


def _cubic(x: np.ndarray) -> np.ndarray:
    """Keys' cubic convolution with a = -1/2."""
    near, far = (1.5 * x - 2.5) * x**2 + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


RESIZERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "bilinear": _triangle,
    "clean": _cubic,
    "tensorflow": _triangle,
}
