"""LPIPS v0.1: a perceptual distance between images in the features of a classifier.

    d(a, b) = sum_l mean_ij sum_c w_lc (u_lijc(a) - u_lijc(b))^2,    u_l = f_l / (|f_l| + 1e-10)

with f_l the features after the ReLU of five layers and |f_l| their norm over channels. Zhang et al. 2018; AlexNet
(the metric that is reported) or VGG-16 (the usual loss). The learned w are non-negative, hence d too, and
d(a, a) = 0. Pixels are normalised by constants that for x in [-1, 1] are ImageNet's mean and standard deviation.
The piq library takes y = (x + 1) / 2: piq(y) equals this for x = 2 y - 1, and its VGG-16 has `pool="avg"`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Dtype
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxdiff.errors import choose, pick
from jaxdiff.models.resize import as_rgb, resize

FULL = jax.lax.Precision.HIGHEST
SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)


class Conv(NamedTuple):
    """A convolution with bias, followed by a ReLU."""

    features: int
    kernel: int = 3
    stride: int = 1
    padding: int = 1


class Trunk(NamedTuple):
    """A classifier, truncated after the last layer compared."""

    stages: tuple[tuple[Conv, ...], ...]  # the last ReLU of each stage is compared
    pooled: tuple[int, ...]  # stages that start with an unpadded pool of stride 2
    window: int  # pool size
    least: int  # the smallest side that leaves a pixel at the end


NETS = {
    "alex": Trunk(
        ((Conv(64, 11, 4, 2),), (Conv(192, 5, 1, 2),), (Conv(384),), (Conv(256),), (Conv(256),)),
        pooled=(1, 2), window=3, least=31,
    ),
    "vgg": Trunk(
        ((Conv(64),) * 2, (Conv(128),) * 2, (Conv(256),) * 3, (Conv(512),) * 3, (Conv(512),) * 3),
        pooled=(1, 2, 3, 4), window=2, least=16,
    ),
}  # fmt: skip
POOLS: dict[str, Callable[..., Array]] = {"max": nn.max_pool, "avg": partial(nn.avg_pool, count_include_pad=False)}


class LPIPS(nn.Module):
    """Pairwise distances of two batches of images, uint8 or in [-1, 1], with 1 or 3 channels.

    The batches go through the network separately, so a target under `stop_gradient` costs no backward pass.
    """

    net: str = "alex"  # or "vgg"
    pool: str = "max"  # or "avg"
    resize: int = 0  # resize images to this side first, bilinear without antialiasing; 0: keep their size
    dtype: Dtype = jnp.float32  # of the convolutions; features are compared in float32

    @nn.compact
    def __call__(self, a: ArrayLike, b: ArrayLike) -> Float[Array, " b"]:
        trunk = pick(NETS, self.net, "LPIPS net")
        choose(self.pool, POOLS, "LPIPS pool")
        a, b = self._pixels(a), self._pixels(b)
        if a.shape != b.shape:
            raise ValueError(f"LPIPS compares batches of equal shape, got {a.shape} and {b.shape}")
        convs = [conv for stage in trunk.stages for conv in stage]
        layers = [
            nn.Conv(
                conv.features, (conv.kernel,) * 2, conv.stride, conv.padding,
                dtype=self.dtype, precision=FULL, name=f"conv{i}",
            )
            for i, conv in enumerate(convs)
        ]  # fmt: skip
        out = jnp.zeros(len(a))
        for i, (f, g) in enumerate(zip(self._features(layers, a), self._features(layers, b), strict=True)):
            weights = self.param(f"lin{i}", nn.initializers.ones, (f.shape[-1],))
            out += ((unit(f) - unit(g)) ** 2 * weights).sum(-1).mean((1, 2))
        return out

    def _pixels(self, images: ArrayLike) -> Float[Array, "b h w 3"]:
        if self.resize < 0:
            raise ValueError(f"resize must be a side in pixels, or 0 to keep the image size; got {self.resize}")
        x = as_rgb(images)
        x = resize(x, self.resize, "bilinear") if self.resize else x
        least = NETS[self.net].least
        if min(x.shape[1:3]) < least:
            raise ValueError(
                f"LPIPS with net={self.net!r} needs images of at least {least}x{least}, got {x.shape[1]}x{x.shape[2]}"
                f"{' after resizing' if self.resize else ''}; set the field resize to {least} or more"
            )
        return (x - jnp.array(SHIFT, x.dtype)) / jnp.array(SCALE, x.dtype)

    def _features(self, layers: list[nn.Conv], x: Float[Array, "b h w 3"]) -> list[Float[Array, "b _ _ _"]]:
        """The features compared, in float32."""
        trunk, rest, out = NETS[self.net], iter(layers), []
        for i, stage in enumerate(trunk.stages):
            if i in trunk.pooled:
                x = POOLS[self.pool](x, (trunk.window,) * 2, (2, 2))
            for _ in stage:
                x = nn.relu(next(rest)(x))
            out.append(x.astype(jnp.float32))
        return out


def unit(x: Float[Array, "*b c"]) -> Float[Array, "*b c"]:
    """x / (|x| + 1e-10) over the last axis; the undefined derivative at zero is set to zero."""
    square = (x**2).sum(-1, keepdims=True)
    some = square > 0
    return x / (jnp.where(some, jnp.sqrt(jnp.where(some, square, 1)), 0) + 1e-10)
