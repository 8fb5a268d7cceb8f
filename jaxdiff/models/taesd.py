"""TAESD (Bohan 2023): a small convolutional autoencoder for the latents of a large one.

`encode` maps images [b h w 3] in [-1, 1] to latents as diffusion models use them, `decode` inverts it.

    block     x = relu(conv2(relu(conv1(relu(conv0(x))))) + x); with `pool`, at the latent resolution,
              x += W relu(norm(V x)) first
    encoder   conv, per level block x blocks [halve], conv; from images in [0, 1]
    decoder   3 tanh(z / 3), conv, relu, per level block x blocks [double], conv; to images in [0, 1]
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Dtype
from jaxtyping import Array, Float

from jaxdiff.models import checks, convolution


def _conv(x: Array, features: int, name: str, dtype: Dtype, size: int = 3, **fields: Any) -> Array:
    return nn.Conv(features, (size, size), name=name, dtype=dtype, padding=size // 2, **fields)(x)


class Block(nn.Module):
    """Three convolutions and a skip; `pool` first mixes channels, normalised over the whole image."""

    pool: bool = False
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h w c"]:
        c = x.shape[-1]
        if self.pool:
            h = _conv(x, 4 * c, "pool_in", self.dtype, size=1, use_bias=False)
            h = nn.GroupNorm(4, epsilon=1e-5, dtype=self.dtype, use_fast_variance=False, name="pool_norm")(h)
            x = x + _conv(nn.relu(h), c, "pool_out", self.dtype, size=1, use_bias=False)
        h = nn.relu(_conv(x, c, "conv0", self.dtype))
        h = nn.relu(_conv(h, c, "conv1", self.dtype))
        return nn.relu(_conv(h, c, "conv2", self.dtype) + x)


class Encoder(nn.Module):
    """Images in [0, 1] to latents of `features` channels."""

    features: int
    width: int
    blocks: tuple[int, ...]
    pool: bool
    dtype: Dtype

    @nn.compact
    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b k l f"]:
        x = _conv(x, self.width, "in_conv", self.dtype)
        for level, count in enumerate(self.blocks):
            if level:
                x = _conv(x, self.width, f"down{level - 1}_conv", self.dtype, strides=2, use_bias=False)
            for i in range(count):
                pool = self.pool and level == len(self.blocks) - 1
                x = Block(pool, self.dtype, name=f"down{level}_block{i}")(x)
        return _conv(x, self.features, "out_conv", self.dtype)


class Decoder(nn.Module):
    """Latents to images in [0, 1] of `features` channels."""

    features: int
    width: int
    blocks: tuple[int, ...]
    pool: bool
    dtype: Dtype

    @nn.compact
    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b k l f"]:
        x = nn.relu(_conv(3 * jnp.tanh(x / 3), self.width, "in_conv", self.dtype))
        for level in reversed(range(len(self.blocks))):
            for i in range(self.blocks[level]):
                pool = self.pool and level == len(self.blocks) - 1
                x = Block(pool, self.dtype, name=f"up{level}_block{i}")(x)
            if level:
                x = _conv(convolution.upsample(x), self.width, f"up{level}_conv", self.dtype, use_bias=False)
        return _conv(x, self.features, "out_conv", self.dtype)


class TAESD(nn.Module):
    """TAESD; channels=16 for SD3 and FLUX, 32 with `pool` for FLUX.2.

    The published weights produce latents as diffusion models use them, already scaled and shifted.
    """

    channels: int = 4  # of the latent
    width: int = 64
    blocks: tuple[int, ...] = (1, 3, 3, 3)  # per level, finest first
    pool: bool = False
    image_channels: int = 3
    dtype: Dtype = jnp.float32

    def setup(self) -> None:
        trunk = (self.width, self.blocks, self.pool, self.dtype)
        self.encoder = Encoder(self.channels, *trunk)
        self.decoder = Decoder(self.image_channels, *trunk)

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h w c"]:
        """The images, encoded and decoded."""
        return self.decode(self.encode(x))

    def encode(self, x: Float[Array, "b h w c"], key: Array | None = None) -> Float[Array, "b k l z"]:
        """The latent; the encoder is deterministic."""
        if key is not None:
            raise ValueError("TAESD's encoder is deterministic and takes no key; omit it")
        factor = 2 ** (len(self.blocks) - 1)
        checks.check_inputs("the encoder of TAESD", x, self.image_channels, factor, None, ())
        return self.encoder((x + 1) / 2).astype(jnp.float32)

    def decode(self, z: Float[Array, "b k l z"]) -> Float[Array, "b h w c"]:
        """Images in float32, not clipped."""
        checks.check_inputs("the decoder of TAESD", z, self.channels, 1, None, ())
        return 2 * self.decoder(z).astype(jnp.float32) - 1
