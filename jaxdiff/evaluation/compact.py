"""A feature network of 0.7 M parameters for images of any kind, which comes with the package: no weights to download.

It was trained to predict the leading principal components of the FID Inception's features from 32x32 pixels, so the
Fréchet distance in its features ranks sets of images much as FID does. It is not an FID and is never called one.
`experiments/evaluation/train_compact.py` makes the weights, `experiments/evaluation/ladder.py` measures the ranking.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import jax
from einops import rearrange
from flax import linen as nn
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxdiff.evaluation.classifier import stored
from jaxdiff.models.resize import as_rgb, resize
from jaxdiff.trees import Params

WEIGHTS = Path(__file__).parent / "compact.npz"
SIDE, RESIZE = 32, "clean"
FULL = jax.lax.Precision.HIGHEST


class Compact(nn.Module):
    """Images [b 32 32 3] in [-1, 1] to {"features": [b, features]}."""

    widths: tuple[int, ...] = (48, 96, 192)
    features: int = 128

    @nn.compact
    def __call__(self, x: Float[Array, "b 32 32 3"]) -> dict[str, Array]:
        x = rearrange(x, "b (h p) (w q) c -> b h w (p q c)", p=2, q=2)
        for i, width in enumerate(self.widths):
            stride = (1, 1) if i == 0 else (2, 2)
            x = nn.silu(nn.Conv(width, (3, 3), stride, precision=FULL, name=f"down{i}")(x))
            x = x + nn.silu(nn.Conv(width, (3, 3), precision=FULL, name=f"conv{i}")(x))
        return {"features": nn.Dense(self.features, precision=FULL, name="out")(x.mean((1, 2)))}


def suits(shape: Sequence[int]) -> bool:
    """Whether an example of this shape is an image that the network can see, not a point or a latent."""
    return len(shape) == 3 and shape[-1] in (1, 3) and min(shape[:2]) >= SIDE // 2


def preprocess(images: ArrayLike) -> Float[Array, "b 32 32 3"]:
    """uint8 or [-1, 1] images at the network's size, antialiased; grayscale is repeated."""
    return resize(as_rgb(images), SIDE, RESIZE)


def load(path: str | os.PathLike | None = None) -> tuple[Compact, Params, str]:
    """The network, its float32 parameters and the sha256 of the file they come from."""
    return Compact(), *stored(Path(path or WEIGHTS))
