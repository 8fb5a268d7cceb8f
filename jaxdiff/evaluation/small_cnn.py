"""A small convolutional network for colour images: features (336) where no public weights are at hand.

Images of any size are resized to 32x32. Features are spatial means of three depths, so that texture counts as well as
content. A Fréchet distance in them ranks sets of images like FID does (docs/evaluation.md says how far), and is not an
FID. Its weights ship with the package; `experiments/evaluation/train_small_cnn.py` reproduces them.
"""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.traverse_util import unflatten_dict
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxdiff.models import convolution
from jaxdiff.models.resize import as_rgb, resize
from jaxdiff.trees import Params

WEIGHTS = Path(__file__).parent / "small_cnn.npz"
SIDE = 32
WIDTHS = ((24,), (48, 48), (96, 96), (192,))  # convolutions per stage; the side halves after each
FULL = jax.lax.Precision.HIGHEST


def preprocess(images: ArrayLike, kind: str = "clean", side: int = SIDE) -> Float[Array, "b s s 3"]:
    """uint8 or [-1, 1] images, resized by `kind`."""
    return resize(as_rgb(images), side, kind)


class SmallCNN(nn.Module):
    """Images [b 32 32 3] in [-1, 1] to {"features": [b, 336], "logits": [b, num_classes]}; 0 classes: no logits."""

    num_classes: int = 0
    loop: bool = False  # gradients that are fast on CPU, for training

    @nn.compact
    def __call__(self, x: Float[Array, "b h w c"]) -> dict[str, Array]:
        fields: dict[str, Any] = {"conv_general_dilated": convolution.loop_conv} if self.loop else {}
        means = []
        for stage, widths in enumerate(WIDTHS):
            for i, width in enumerate(widths):
                conv = nn.Conv(width, (3, 3), padding=1, precision=FULL, name=f"stage{stage}_conv{i}", **fields)
                x = nn.relu(conv(x))
            means.append(x.mean((1, 2)))
            x = x.reshape(len(x), x.shape[1] // 2, 2, x.shape[2] // 2, 2, -1).mean((2, 4))
        out = {"features": jnp.concatenate(means[1:], axis=-1)}
        if self.num_classes:
            out["logits"] = nn.Dense(self.num_classes, precision=FULL, name="classes")(means[-1])
        return out


def load(path: str | os.PathLike | None = None) -> tuple[SmallCNN, Params, str]:
    """The network without its classes, float32 parameters, and the sha256 of the file they come from."""
    data = Path(path or WEIGHTS).read_bytes()
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        flat = {tuple(name.split(".")): arrays[name].astype(np.float32) for name in arrays.files}
    return SmallCNN(), unflatten_dict(flat), hashlib.sha256(data).hexdigest()
