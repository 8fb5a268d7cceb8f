"""DINOv2's vision transformers (Oquab et al. 2023), whose class tokens are an alternative to Inception features.

    x = [class token, patches W + b] + positions
    block    x += g1 attention(norm0(x));  x += g2 out(gelu(in(norm1(x))))
    feature  norm(x)[class token]

Stein et al. 2023 measure the Fréchet distance in the class tokens of ViT-L/14 for images resized to 224x224 (called
FD-DINOv2). Positions were trained on a grid of 37 x 37 patches; other grids resample them as the public program does.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxdiff.models import attention, transformer
from jaxdiff.models.clip import MLP
from jaxdiff.models.resize import as_rgb, resize

SIDE = 224
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, for RGB in [0, 1]
OFFSET = 0.1  # the public program resamples positions to a grid this much larger
HEAD_WIDTH = 64
normal = nn.initializers.normal(0.02)


def preprocess(images: ArrayLike, kind: str = "clean", side: int = SIDE) -> Float[Array, "b s s 3"]:
    """uint8 or [-1, 1] images resized by `kind` and normalised."""
    unit = (resize(as_rgb(images), side, kind) + 1) / 2
    return (unit - jnp.asarray(MEAN)) / jnp.asarray(STD)


def resampling(count: int, base: int) -> np.ndarray:
    """The matrix [count, base] of torch's bicubic interpolation by the factor (count + OFFSET) / base.

    Cubic convolution with a = -3/4, not antialiased; positions outside the grid are those of its border.
    """
    if count == base:
        return np.eye(base)
    centres = (np.arange(count) + 0.5) * base / (count + OFFSET) - 0.5
    first = np.floor(centres).astype(int)
    table = np.zeros((count, base))
    for tap in range(-1, 3):
        d = np.abs(centres - (first + tap))
        near = (1.25 * d - 2.25) * d**2 + 1
        far = ((-0.75 * d + 3.75) * d - 6) * d + 3
        np.add.at(table, (np.arange(count), (first + tap).clip(0, base - 1)), np.where(d <= 1, near, far))
    return table


def _norm(name: str) -> nn.LayerNorm:
    return nn.LayerNorm(epsilon=1e-6, use_fast_variance=False, name=name)


class Block(nn.Module):
    """Pre-norm attention and MLP, each scaled per channel."""

    heads: int

    @nn.compact
    def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        d = x.shape[-1]
        scale0, scale1 = (self.param(name, nn.initializers.ones, (d,)) for name in ("scale0", "scale1"))
        x = x + scale0 * attention.SelfAttention(self.heads, name="attention")(_norm("norm0")(x))
        return x + scale1 * MLP(4 * d, "gelu", name="mlp")(_norm("norm1")(x))


class DINOv2(nn.Module):
    """Preprocessed images, with sides that are multiples of the patch, to features [b d] and patches [b r c d]."""

    width: int = 1024  # 384, 768 and 1024 in ViT-S, B and L
    depth: int = 24  # 12, 12 and 24
    patch: int = 14
    grid: int = 37  # side of the grid of positions

    @nn.compact
    def __call__(self, x: Float[Array, "b h w 3"]) -> dict[str, Array]:
        if x.shape[1] % self.patch or x.shape[2] % self.patch:
            raise ValueError(
                f"DINOv2 takes images whose sides are multiples of {self.patch}, got {x.shape[1]}x{x.shape[2]}; "
                f"resize them to {SIDE}x{SIDE}, as models.dinov2.preprocess does"
            )
        rows, columns = (jnp.asarray(resampling(size // self.patch, self.grid), x.dtype) for size in x.shape[1:3])
        with jax.default_matmul_precision("highest"):
            positions = self.param("positions", normal, (self.grid**2 + 1, self.width))
            table = positions[1:].reshape(self.grid, self.grid, self.width)
            table = jnp.einsum("ia,jb,abd->ijd", rows, columns, table).reshape(-1, self.width)
            x = nn.Dense(self.width, name="patches")(transformer.patchify(x, self.patch)) + table
            start = self.param("class_token", normal, (self.width,)) + positions[0]
            x = jnp.concatenate([jnp.broadcast_to(start, (len(x), 1, self.width)), x], axis=1)
            for i in range(self.depth):
                x = Block(self.width // HEAD_WIDTH, name=f"blocks_{i}")(x)
            x = _norm("out_norm")(x)
            return {"features": x[:, 0], "patches": x[:, 1:].reshape(len(x), len(rows), len(columns), self.width)}
