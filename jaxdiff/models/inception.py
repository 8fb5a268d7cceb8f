"""The Inception-v3 of FID: the graph of 2015-12-05, whose pool3 features (2048) define every published FID.

It is not the Inception-v3 of the paper or of torchvision: average pooling excludes padding, the last block uses
max pooling, batch norm has epsilon 1e-3, there are 1008 logits. Layers are named as in the public weights.
Szegedy et al. 2015 (network), Heusel et al. 2017 (FID). All products run in full float32, so that the reduced
default precision of TPUs and GPUs does not change the number.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxdiff.models.resize import as_rgb, resize

SIDE = 299
FULL = jax.lax.Precision.HIGHEST
ones, zeros = nn.initializers.ones, nn.initializers.zeros


def preprocess(images: ArrayLike, kind: str = "bilinear", side: int = SIDE) -> Float[Array, "b s s 3"]:
    """uint8 or [-1, 1] images resized by `kind` (see `resize`) and scaled as the reference implementation of that kind.

    With 8-bit values u, pytorch-fid ("bilinear") scales to u / 127.5 - 1, the other two to (u - 128) / 128.
    """
    x = resize(as_rgb(images), side, kind)
    return x if kind == "bilinear" else (x * 127.5 - 0.5) / 128


class ConvNorm(nn.Module):
    """Convolution, batch norm with stored statistics (folded into the kernel), ReLU."""

    features: int
    kernel: tuple[int, int]
    stride: int = 1
    padding: str = "SAME"

    @nn.compact
    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b k l d"]:
        shape = (*self.kernel, x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.he_normal(), shape)
        inits = {"scale": ones, "bias": zeros, "mean": zeros, "var": ones}
        scale, bias, mean, var = (self.param(name, init, (self.features,)) for name, init in inits.items())
        gain = scale * jax.lax.rsqrt(var + 1e-3)
        out = jax.lax.conv_general_dilated(
            x, kernel * gain, (self.stride, self.stride), self.padding,
            dimension_numbers=("NHWC", "HWIO", "NHWC"), precision=FULL,
        )  # fmt: skip
        return nn.relu(out + (bias - mean * gain))


def _conv(
    x: Array, name: str, features: int, kernel: int | tuple[int, int], stride: int = 1, pad: bool = True
) -> Array:
    """One layer; `kernel` is a side or (rows, columns). Strided layers are not padded."""
    kernel = (kernel, kernel) if isinstance(kernel, int) else kernel
    padding = "SAME" if pad and stride == 1 else "VALID"
    return ConvNorm(features, kernel, stride, padding, name=name)(x)


def _chain(x: Array, name: str, *layers: tuple) -> Array:
    """Layers {name}_1, {name}_2, ... in sequence, each (features, kernel[, stride])."""
    for i, layer in enumerate(layers):
        x = _conv(x, f"{name}_{i + 1}", *layer)
    return x


def _shrink(x: Array) -> Array:
    return nn.max_pool(x, (3, 3), (2, 2))


def _average(x: Array) -> Array:
    """3x3 average pooling that excludes padding."""
    return nn.avg_pool(x, (3, 3), (1, 1), "SAME", count_include_pad=False)


def _join(*branches: Array) -> Array:
    return jnp.concatenate(branches, axis=-1)


class Mixed5(nn.Module):
    """1x1, 5x5, double 3x3 and pooled branches at 1/8 of the side."""

    pooled: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        return _join(
            _conv(x, "branch1x1", 64, 1),
            _chain(x, "branch5x5", (48, 1), (64, 5)),
            _chain(x, "branch3x3dbl", (64, 1), (96, 3), (96, 3)),
            _conv(_average(x), "branch_pool", self.pooled, 1),
        )


class Mixed6a(nn.Module):
    """Down to 1/16 of the side."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        return _join(
            _conv(x, "branch3x3", 384, 3, 2), _chain(x, "branch3x3dbl", (64, 1), (96, 3), (96, 3, 2)), _shrink(x)
        )


class Mixed6(nn.Module):
    """Factorised 7x7 branches."""

    width: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        w, row, column = self.width, (1, 7), (7, 1)
        return _join(
            _conv(x, "branch1x1", 192, 1),
            _chain(x, "branch7x7", (w, 1), (w, row), (192, column)),
            _chain(x, "branch7x7dbl", (w, 1), (w, column), (w, row), (w, column), (192, row)),
            _conv(_average(x), "branch_pool", 192, 1),
        )


class Mixed7a(nn.Module):
    """Down to 1/32 of the side."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        return _join(
            _chain(x, "branch3x3", (192, 1), (320, 3, 2)),
            _chain(x, "branch7x7x3", (192, 1), (192, (1, 7)), (192, (7, 1)), (192, 3, 2)),
            _shrink(x),
        )


class Mixed7(nn.Module):
    """Branches that end in a row and a column convolution."""

    maximum: bool  # max pooling, as in the last block of the 2015 graph

    @nn.compact
    def __call__(self, x: Array) -> Array:
        single = _conv(x, "branch3x3_1", 384, 1)
        double = _chain(x, "branch3x3dbl", (448, 1), (384, 3))
        pooled = nn.max_pool(x, (3, 3), (1, 1), "SAME") if self.maximum else _average(x)
        return _join(
            _conv(x, "branch1x1", 320, 1),
            _conv(single, "branch3x3_2a", 384, (1, 3)),
            _conv(single, "branch3x3_2b", 384, (3, 1)),
            _conv(double, "branch3x3dbl_3a", 384, (1, 3)),
            _conv(double, "branch3x3dbl_3b", 384, (3, 1)),
            _conv(pooled, "branch_pool", 192, 1),
        )


class Inception(nn.Module):
    """Preprocessed images to {"features": [b, 2048], "spatial": [b, 2023], "logits": [b, num_classes]}.

    `spatial` is what sFID is computed in (Nash et al. 2021, in ADM's form): 7 channels of Mixed_6d at every position,
    17 x 17 of them for images of 299. Without classes there are no logits.
    """

    num_classes: int = 1008

    @nn.compact
    def __call__(self, x: Float[Array, "b h w 3"]) -> dict[str, Array]:
        if min(x.shape[1:3]) < 75:
            raise ValueError(f"Inception needs images of at least 75x75, got {x.shape[1]}x{x.shape[2]}; resize them")
        x = _conv(x, "Conv2d_1a_3x3", 32, 3, 2)
        x = _conv(x, "Conv2d_2a_3x3", 32, 3, pad=False)
        x = _shrink(_conv(x, "Conv2d_2b_3x3", 64, 3))
        x = _conv(x, "Conv2d_3b_1x1", 80, 1)
        x = _shrink(_conv(x, "Conv2d_4a_3x3", 192, 3, pad=False))
        for letter, pooled in zip("bcd", (32, 64, 64), strict=True):
            x = Mixed5(pooled, name=f"Mixed_5{letter}")(x)
        x = Mixed6a(name="Mixed_6a")(x)
        for letter, width in zip("bcde", (128, 160, 160, 192), strict=True):
            x = Mixed6(width, name=f"Mixed_6{letter}")(x)
            if letter == "d":
                spatial = x[..., :7].reshape(len(x), -1)
        x = Mixed7a(name="Mixed_7a")(x)
        x = Mixed7(maximum=False, name="Mixed_7b")(x)
        features = Mixed7(maximum=True, name="Mixed_7c")(x).mean((1, 2))
        out = {"features": features, "spatial": spatial}
        if self.num_classes:
            out["logits"] = nn.Dense(self.num_classes, precision=FULL, name="fc")(features)
        return out
