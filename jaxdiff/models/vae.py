"""The autoencoder of latent diffusion (Rombach et al. 2022), in the layouts of Stable Diffusion 1, 2, SDXL, 3 and FLUX.

`encode` maps images [b h w 3] in [-1, 1] to latents, `decode` inverts it. Scale and shift are applied inside, so
latents are as diffusion models use them.

    block     h = conv1(silu(norm1(conv0(silu(norm0(x))))));  x = h + skip(x)
    middle    block, single-head attention over all pixels, block
    encoder   conv, per level block x blocks [halve], middle, norm, silu, conv -> [mean, log variance] (-> 1x1 conv)
    decoder   (1x1 conv ->) conv, middle, per level block x (blocks + 1) [double], norm, silu, conv
    latent    z = scale (mean + std eps - shift)

`SIZES` holds the published layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Dtype
from jaxtyping import Array, Float

from jaxdiff.models import attention, checks, convolution

SIZES: dict[str, dict[str, Any]] = {
    "sd": {},
    "sdxl": {"scale": 0.13025},
    "sd3": {"channels": 16, "quant": False, "scale": 1.5305, "shift": 0.0609},
    "flux": {"channels": 16, "quant": False, "scale": 0.3611, "shift": 0.1159},
}


def _conv(x: Array, features: int, name: str, dtype: Dtype, size: int = 3, **fields: Any) -> Array:
    return nn.Conv(features, (size, size), name=name, dtype=dtype, **{"padding": size // 2, **fields})(x)


class Block(nn.Module):
    """A residual block."""

    features: int
    groups: int = 32
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h w f"]:
        h = _conv(nn.silu(_norm(x, self.groups, self.dtype, "norm0")), self.features, "conv0", self.dtype)
        h = _conv(nn.silu(_norm(h, self.groups, self.dtype, "norm1")), self.features, "conv1", self.dtype)
        if x.shape[-1] != self.features:
            x = _conv(x, self.features, "skip", self.dtype, size=1)
        return h + x


def _norm(x: Array, groups: int, dtype: Dtype, name: str) -> Array:
    return nn.GroupNorm(groups, epsilon=1e-6, dtype=dtype, use_fast_variance=False, name=name)(x)


class Attention(nn.Module):
    """Single-head self-attention over all pixels."""

    groups: int = 32
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h w c"]:
        b, h, w, c = x.shape
        tokens = _norm(x, self.groups, self.dtype, "norm").reshape(b, h * w, c)
        q, k, v = attention.qkv_heads(tokens, 1, self.dtype)
        return x + attention.merge_heads(jax.nn.dot_product_attention(q, k, v), c, self.dtype).reshape(x.shape)


class Encoder(nn.Module):
    """Images to `features` channels at latent resolution."""

    features: int
    width: int
    channel_mult: tuple[int, ...]
    blocks: int
    groups: int
    dtype: Dtype

    @nn.compact
    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b k l f"]:
        block = partial(Block, groups=self.groups, dtype=self.dtype)
        x = _conv(x, self.width, "in_conv", self.dtype)
        for level, multiplier in enumerate(self.channel_mult):
            if level:  # padded by one row and column at the end only
                x = _conv(x, x.shape[-1], f"down{level - 1}_conv", self.dtype, strides=2, padding=((0, 1), (0, 1)))
            for i in range(self.blocks):
                x = block(multiplier * self.width, name=f"down{level}_block{i}")(x)
        x = _middle(x, block, self.groups, self.dtype)
        x = nn.silu(_norm(x, self.groups, self.dtype, "out_norm"))
        return _conv(x, self.features, "out_conv", self.dtype)


class Decoder(nn.Module):
    """Latents to images of `features` channels."""

    features: int
    width: int
    channel_mult: tuple[int, ...]
    blocks: int
    groups: int
    dtype: Dtype

    @nn.compact
    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b k l f"]:
        block = partial(Block, groups=self.groups, dtype=self.dtype)
        x = _conv(x, self.channel_mult[-1] * self.width, "in_conv", self.dtype)
        x = _middle(x, block, self.groups, self.dtype)
        for level in reversed(range(len(self.channel_mult))):
            for i in range(self.blocks + 1):
                x = block(self.channel_mult[level] * self.width, name=f"up{level}_block{i}")(x)
            if level:
                x = _conv(convolution.upsample(x), x.shape[-1], f"up{level}_conv", self.dtype)
        x = nn.silu(_norm(x, self.groups, self.dtype, "out_norm"))
        return _conv(x, self.features, "out_conv", self.dtype)


def _middle(x: Array, block: Callable[..., nn.Module], groups: int, dtype: Dtype) -> Array:
    x = block(x.shape[-1], name="mid_block0")(x)
    x = Attention(groups, dtype, name="mid_attention")(x)
    return block(x.shape[-1], name="mid_block1")(x)


class AutoencoderKL(nn.Module):
    """The autoencoder of Stable Diffusion; the defaults are versions 1 and 2, `SIZES` has the others.

    quant: 1x1 convolutions on both sides of the latent, which SD3 dropped.
    """

    channels: int = 4  # of the latent
    width: int = 128
    channel_mult: tuple[int, ...] = (1, 2, 4, 4)
    blocks: int = 2
    groups: int = 32  # of the group norms
    quant: bool = True
    scale: float = 0.18215
    shift: float = 0.0
    image_channels: int = 3
    dtype: Dtype = jnp.float32

    def setup(self) -> None:
        if self.width % self.groups:
            raise ValueError(f"width={self.width} is not divisible by groups={self.groups}; set groups to a divisor")
        trunk = (self.width, self.channel_mult, self.blocks, self.groups, self.dtype)
        self.encoder = Encoder(2 * self.channels, *trunk)
        self.decoder = Decoder(self.image_channels, *trunk)
        if self.quant:
            self.to_moments = nn.Conv(2 * self.channels, (1, 1), dtype=self.dtype)
            self.from_latent = nn.Conv(self.channels, (1, 1), dtype=self.dtype)

    def __call__(self, x: Float[Array, "b h w c"], key: Array | None = None) -> Float[Array, "b h w c"]:
        """The images, encoded and decoded."""
        return self.decode(self.encode(x, key))

    def encode(self, x: Float[Array, "b h w c"], key: Array | None = None) -> Float[Array, "b k l z"]:
        """The posterior mean; with a key, or one key per example, a posterior sample."""
        mean, std = self.posterior(x)
        return mean if key is None else mean + std * _normal(key, mean.shape)

    def posterior(self, x: Float[Array, "b h w c"]) -> tuple[Float[Array, "b k l z"], Float[Array, "b k l z"]]:
        """Mean and standard deviation of the latent, scaled and shifted, in float32."""
        checks.check_inputs(
            "the encoder of AutoencoderKL", x, self.image_channels, 2 ** (len(self.channel_mult) - 1), None, ()
        )
        moments = self.encoder(x)
        moments = self.to_moments(moments) if self.quant else moments
        mean, log_variance = jnp.split(moments.astype(jnp.float32), 2, axis=-1)
        return (mean - self.shift) * self.scale, jnp.exp(log_variance.clip(-30, 20) / 2) * self.scale

    def decode(self, z: Float[Array, "b k l z"]) -> Float[Array, "b h w c"]:
        """Images in float32, not clipped."""
        checks.check_inputs("the decoder of AutoencoderKL", z, self.channels, 1, None, ())
        z = z / self.scale + self.shift
        return self.decoder(self.from_latent(z) if self.quant else z).astype(jnp.float32)


def _normal(key: Array, shape: tuple[int, ...]) -> Array:
    """Noise from one key, or one key per example, which makes a latent independent of its batch."""
    if key.ndim == 0:
        return jax.random.normal(key, shape)
    return jax.vmap(lambda k: jax.random.normal(k, shape[1:]))(key)
