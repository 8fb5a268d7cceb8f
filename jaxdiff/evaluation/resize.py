"""Resizing to the side a feature network wants. FIDs differ by the kind, so a kind is always named, never implied.

    bilinear    half-pixel centres, no antialiasing: torch's interpolate(align_corners=False), as in pytorch-fid
    clean       bicubic (a = -1/2) widened when shrinking: Pillow's BICUBIC on float channels, as in clean-fid
    tensorflow  bilinear with pixel i at i * in / out, no antialiasing: TF 1, as in the original FID, ADM and EDM

Each is one matrix for the rows and one for the columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxdiff.errors import pick


def as_float(images: Any) -> Float[Array, "b h w c"]:
    """Images [b h w c] in [-1, 1], float32: 8-bit ones scaled, floating ones as they are."""
    images = jnp.asarray(images)
    if images.ndim != 4:
        raise ValueError(f"images must be [b, h, w, c] (NHWC), got shape {images.shape}")
    if images.dtype == jnp.uint8:
        return images.astype(jnp.float32) / 127.5 - 1
    if not jnp.issubdtype(images.dtype, jnp.floating):
        raise ValueError(f"images must be uint8 in 0..255 or floating in [-1, 1], got {images.dtype}")
    return images.astype(jnp.float32)


def as_rgb(images: Any) -> Float[Array, "b h w 3"]:
    """The same with three channels; a grey image is repeated."""
    images = as_float(images)
    if images.shape[-1] not in (1, 3):
        raise ValueError(f"a network for photographs takes 1 or 3 channels, got {images.shape[-1]}; decode latents")
    return jnp.broadcast_to(images, (*images.shape[:-1], 3))


def resize(images: Float[Array, "b h w c"], side: int, kind: str) -> Float[Array, "b {side} {side} c"]:
    """Images [b side side c]; an image of that side already is returned as it is, whatever the kind."""
    rows, columns = (jnp.asarray(weights(size, side, kind), images.dtype) for size in images.shape[1:3])
    if images.shape[1:3] == (side, side):
        return images
    return jnp.einsum("ih,jw,bhwc->bijc", rows, columns, images, precision=jax.lax.Precision.HIGHEST)


def weights(size: int, out: int, kind: str) -> np.ndarray:
    """How much each of `size` pixels counts in each of `out` pixels along one axis, [out, size]; rows sum to 1."""
    rule = pick(KINDS, kind, "resize kind")
    scale = size / out
    centres = np.arange(out) * scale if kind == "tensorflow" else (np.arange(out) + 0.5) * scale - 0.5
    if kind != "clean":
        centres = centres.clip(0, size - 1)  # beyond the border the border pixel counts alone
    width = max(scale, 1.0) if kind == "clean" else 1.0
    table = rule(np.abs(centres[:, None] - np.arange(size)) / width)
    return table / table.sum(1, keepdims=True)


def _triangle(distance: np.ndarray) -> np.ndarray:
    return np.maximum(1 - distance, 0)


def _cubic(x: np.ndarray) -> np.ndarray:
    """Keys' cubic convolution with a = -1/2."""
    near, far = (1.5 * x - 2.5) * x**2 + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


KINDS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "bilinear": _triangle,
    "clean": _cubic,
    "tensorflow": _triangle,
}
