"""EDM2's UNet (Karras et al. 2024, arXiv 2312.02696, config G): magnitude-preserving, without biases or group norms.

    embedding  e = silu(blend(W_noise fourier(noise_label), W_label (one-hot label) sqrt(classes), label_balance))
    encoder    x = normalize(skip(resample(x)))                     over the channels of each pixel
    decoder    x = resample(concat(x, skip connection, concat_balance))
    block      y = conv1(dropout(silu(conv0(silu(x)) (1 + gain W_e e))));  x = blend(x, y, res_balance)
               the decoder applies its skip convolution here, to the x of the sum
    attention  q, k, v = normalize(W x) over the channels of a head;  x = blend(x, W attend(q, k, v), attn_balance)
    output     gain conv(x); the input has a further channel of ones in place of biases

silu, blend, concat, normalize and all weights are those of magnitude.py. The gains start at 0. u(sigma), a second small
head, is the logarithm of the variance of the denoising error that training learns (diffusion.uncertainty).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import linen as nn
from flax.typing import Dtype
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxdiff.conditions import Cond, Signal
from jaxdiff.conventions import EDM
from jaxdiff.models import (
    attention,
    checks,
    conditioning,
    convolution,
    embeddings,
    initializers,
    magnitude,
    stacks,
    taps,
)
from jaxdiff.models.magnitude import Conv, Fourier, Linear
from jaxdiff.trees import Params

SIZES = {"XS": 128, "S": 192, "M": 256, "L": 320, "XL": 384, "XXL": 448}  # widths of the published networks
LIMIT = 256.0  # activations are clipped here, for half precision


class Block(nn.Module):
    """A residual block with optional resampling and attention."""

    features: int
    decoder: bool = False
    resample: str = ""  # "", "down" or "up"
    heads: int = 0  # 0: no attention
    res_balance: float = 0.3
    attn_balance: float = 0.3
    dropout: float = 0.0
    deterministic: bool = True
    loop: bool = False
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "b h w c"], e: Float[Array, "b d"]) -> Float[Array, "b k l f"]:
        if self.resample:
            x = {"up": convolution.upsample, "down": convolution.downsample}[self.resample](x)
        if not self.decoder:
            x = magnitude.normalize(self._skip(x), (-1,))
        y = self._conv("conv0", magnitude.silu(x))
        gain = self.param("gain", initializers.zeros, ())
        scale = 1 + Linear((self.features,), dtype=self.dtype, name="affine")(e, gain)
        y = magnitude.silu(y * scale[:, None, None])
        y = nn.Dropout(self.dropout, deterministic=self.deterministic)(y)
        y = taps.tap(self, "increment", self._conv("conv1", y))
        if self.decoder:
            x = self._skip(x)
        x = magnitude.blend(x, y, self.res_balance)
        if self.heads:
            x = self._attend(taps.tap(self, "res", x))
        return taps.tap(self, "out", x.clip(-LIMIT, LIMIT))

    def _conv(self, name: str, x: Array, size: int = 3) -> Array:
        return Conv(self.features, size, self.loop, self.dtype, name=name)(x)

    def _skip(self, x: Array) -> Array:
        if x.shape[-1] == self.features:
            return x
        return taps.tap(self, "skip", self._conv("skip", x, size=1))

    def _attend(self, x: Array) -> Array:
        b, height, width, c = x.shape
        tokens = x.reshape(b, height * width, c)
        qkv = Linear((3, self.heads, c // self.heads), dtype=self.dtype, name="qkv")(tokens)
        q, k, v = (magnitude.normalize(qkv[:, :, i], (-1,)) for i in range(3))
        taps.tap_heads(self, prefix="attention/", q=q, k=k, v=v)
        y = Linear((c,), inputs=2, dtype=self.dtype, name="out")(attention.attend(q, k, v))
        taps.tap(self, "attention/out", y)
        return magnitude.blend(x, y.reshape(x.shape), self.attn_balance)


class Uncertainty(nn.Module):
    """u of a noise label."""

    features: int

    @nn.compact
    def __call__(self, noise_label: Float[Array, " b"]) -> Float[Array, " b"]:
        return Linear((1,), name="linear")(Fourier(self.features, name="fourier")(noise_label))[:, 0]


class EDM2(nn.Module):
    """EDM2's UNet. The defaults are EDM2-S for ImageNet at 64x64; `resolution` is the nominal one.

    `noise_label` is EDM's c_noise = ln(sigma)/4. cond takes `label` (num_classes: no class). Kernels must stay
    normalized: `force(params)` follows every update. `log_variance(sigma)` is u(sigma). patch = 2 convolves patches of
    2x2 pixels instead of pixels: a quarter of the work; `attention` then counts patches.
    """

    resolution: int = 64
    channels: int = 3
    width: int = 192
    channel_mult: tuple[int, ...] = (1, 2, 3, 4)
    blocks: int = 3
    attention: tuple[int, ...] = (16, 8)  # resolutions at which blocks attend
    num_classes: int = 0
    dropout: float = 0.0
    channels_per_head: int = 64  # channels per attention head
    label_balance: float = 0.5
    concat_balance: float = 0.5
    res_balance: float = 0.3
    attn_balance: float = 0.3
    noise_channels: int = 0  # random features of the noise label; 0: width
    embed_channels: int = 0  # of the embedding; 0: those of the widest level
    uncertainty_channels: int = 128  # random features of u
    loop: bool = False
    dtype: Dtype = jnp.float32
    remat: bool | str = False  # or one of stacks.REMAT
    attend_between: bool = True  # attention in the first block of the decoder
    patch: int = 1  # pixels along a side of what is convolved as one
    scalars: tuple[str, ...] = ()  # further scalar conditions, embedded as zero at initialisation, as ("tau",)

    published = EDM()

    def setup(self) -> None:
        self.uncertainty = Uncertainty(self.uncertainty_channels)

    @nn.nowrap
    def signals(self) -> dict[str, Signal]:
        """What it is conditioned on."""
        return conditioning.signals(self)

    @nn.nowrap
    def force(self, params: Params) -> Params:
        """The parameters with normalized kernels, as training keeps them."""
        return magnitude.force(params)

    def log_variance(self, sigma: ArrayLike) -> Float[Array, " b"]:
        """u(sigma), the logarithm of the learned variance of the denoising error, for sigma [b]."""
        return self.uncertainty(jnp.log(jnp.asarray(sigma, jnp.float32).reshape(-1)) / 4)

    @nn.compact
    def __call__(
        self, x: Float[Array, "b h w c"], noise_label: ArrayLike, cond: Cond = None, *, deterministic: bool = True
    ) -> Float[Array, "b h w c"]:
        stride = self.patch * 2 ** (len(self.channel_mult) - 1)
        checks.check_inputs("EDM2", x, self.channels, stride, cond, self.signals())
        noise = embeddings.noise_labels(noise_label, x)
        e = self._embed(noise, cond or {}).astype(self.dtype)
        if self.is_initializing():
            self.uncertainty(noise)
        block = stacks.rematerialised(Block, self.remat)

        def run(x: Array, name: str, features: int, attend: bool = False, **kwargs: Any) -> Array:
            heads = max(1, features // self.channels_per_head) if attend else 0
            balances = {"res_balance": self.res_balance, "attn_balance": self.attn_balance}
            fields = {"dropout": self.dropout, "deterministic": deterministic, "loop": self.loop, "dtype": self.dtype}
            return block(features, heads=heads, name=name, **balances, **fields, **kwargs)(x, e)

        x = rearrange(taps.tap(self, "in", x), "b (h p) (w q) c -> b h w (p q c)", p=self.patch, q=self.patch)
        x = jnp.concatenate([x, jnp.ones((*x.shape[:-1], 1), x.dtype)], axis=-1).astype(self.dtype)
        x, skips = self._encode(run, x)
        x = self._decode(run, x, skips)
        gain = self.param("out_gain", initializers.zeros, ())
        x = Conv(self.channels * self.patch**2, loop=self.loop, dtype=self.dtype, name="out_conv")(x, gain)
        x = rearrange(x.astype(jnp.float32), "b h w (p q c) -> b (h p) (w q) c", p=self.patch, q=self.patch)
        return taps.tap(self, "out", x)

    def _embed(self, noise_label: Array, cond: Mapping[str, Array]) -> Array:
        features = self.embed_channels or self.width * max(self.channel_mult)
        noise = Fourier(self.noise_channels or self.width, name="noise_fourier")(noise_label)
        e = Linear((features,), name="map_noise")(noise)
        if self.num_classes:
            label = cond.get("label", jnp.full(noise_label.shape, self.num_classes))
            onehot = jax.nn.one_hot(label, self.num_classes, dtype=jnp.float32)  # num_classes itself maps to zeros
            classes = Linear((features,), name="map_label")(onehot * self.num_classes**0.5)
            e = magnitude.blend(e, classes, self.label_balance)
        for name in self.scalars:  # up to 1000, so that thousandths are like noise labels
            value = embeddings.scalar_value(noise_label, cond, name) / 1000
            fourier = Fourier(self.noise_channels or self.width, name=f"scalar_{name}_fourier")(value)
            gain = self.param(f"scalar_{name}_gain", initializers.zeros, ())
            e = e + Linear((features,), name=f"scalar_{name}")(fourier, gain)
        return magnitude.silu(e)

    def _encode(self, run: Callable[..., Array], x: Array) -> tuple[Array, list[Array]]:
        skips = []
        for level, multiplier in enumerate(self.channel_mult):
            side = self.resolution // self.patch >> level
            if level == 0:
                conv = Conv(self.width * multiplier, loop=self.loop, dtype=self.dtype, name=f"enc_{side}x{side}_conv")
                x = taps.tap(self, "embedded", conv(x))
            else:
                x = run(x, f"enc_{side}x{side}_down", x.shape[-1], resample="down")
            skips.append(x)
            for i in range(self.blocks):
                x = run(x, f"enc_{side}x{side}_block{i}", self.width * multiplier, side in self.attention)
                skips.append(x)
        return x, skips

    def _decode(self, run: Callable[..., Array], x: Array, skips: list[Array]) -> Array:
        deepest = len(self.channel_mult) - 1
        for level in range(deepest, -1, -1):
            side = self.resolution // self.patch >> level
            if level == deepest:
                x = run(x, f"dec_{side}x{side}_in0", x.shape[-1], self.attend_between, decoder=True)
                x = run(x, f"dec_{side}x{side}_in1", x.shape[-1], decoder=True)
            else:
                x = run(x, f"dec_{side}x{side}_up", x.shape[-1], decoder=True, resample="up")
            for i in range(self.blocks + 1):
                x = magnitude.concat(x, skips.pop(), self.concat_balance)
                name, features = f"dec_{side}x{side}_block{i}", self.width * self.channel_mult[level]
                x = run(x, name, features, side in self.attention, decoder=True)
        return x
