"""The text-to-image UNet of latent diffusion (Rombach et al. 2022) in the layouts of Stable Diffusion 1, 2 and SDXL.

    e           silu(E_t(t) + E_a([pooled text, sinusoids of the sizes])); the second term only in SDXL,
                control (conditioning.py) as an optional third
    block       h = conv0(silu(norm0(x))) + e W;  h = conv1(dropout(silu(norm1(h))));  x = h + skip(x)
    transformer z = norm(x) W_in;  depth times z += self(norm0(z)), cross(norm1(z), text), mlp(norm2(z));  x += z W_out
                mlp(z) = (a gelu(g)) W with [a, g] = z V, the exact GELU
    encoder     conv, then per level [halve] (block [transformer]) x blocks; every output becomes a skip
    middle      block, transformer, block
    decoder     per level (block [transformer]) x (blocks + 1) on [x, skip] [double]

`SIZES` holds the published layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Dtype
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from jaxdiff.conditions import CONTROL, Cond, Signal
from jaxdiff.conventions import DDPM
from jaxdiff.models import (
    attention,
    checks,
    conditioning,
    convolution,
    embeddings,
    initializers,
    stacks,
    taps,
)

SIZES: dict[str, dict[str, Any]] = {
    "sd1": {},
    "sd2": {"heads": 0, "head_width": 64, "text_dim": 1024, "linear": True},
    "sdxl": {
        "channel_mult": (1, 2, 4), "depths": (0, 2, 10), "mid_depth": 10, "heads": 0, "head_width": 64,
        "text_dim": 2048, "pooled_dim": 1280, "sizes": 6, "linear": True,
    },
}  # fmt: skip

fan_in = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


def _group_norm(x: Array, groups: int, epsilon: float, dtype: Dtype, name: str) -> Array:
    return nn.GroupNorm(groups, epsilon=epsilon, dtype=dtype, use_fast_variance=False, name=name)(x)


def _conv(x: Array, features: int, name: str, *, loop: bool, size: int = 3, **fields: Any) -> Array:
    fields = {"kernel_init": fan_in, "padding": size // 2, **fields}
    if loop:
        fields["conv_general_dilated"] = convolution.loop_conv
    return nn.Conv(features, (size, size), name=name, **fields)(x)


class Block(nn.Module):
    """A residual block conditioned by adding the embedding."""

    features: int
    groups: int = 32
    dropout: float = 0.0
    deterministic: bool = True
    loop: bool = False
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "b h w c"], e: Float[Array, "b d"]) -> Float[Array, "b h w f"]:
        norm = partial(_group_norm, groups=self.groups, epsilon=1e-5, dtype=self.dtype)
        conv = partial(_conv, features=self.features, loop=self.loop, dtype=self.dtype)
        h = conv(nn.silu(taps.tap(self, "norm0", norm(x, name="norm0"))), name="conv0")
        h = h + nn.Dense(self.features, kernel_init=fan_in, dtype=self.dtype, name="embed")(e)[:, None, None]
        h = nn.silu(taps.tap(self, "norm1", norm(h, name="norm1")))
        h = nn.Dropout(self.dropout, deterministic=self.deterministic)(h)
        h = taps.tap(self, "increment", conv(h, name="conv1", kernel_init=initializers.zeros))
        if x.shape[-1] != self.features:
            x = taps.tap(self, "skip", conv(x, name="skip", size=1))
        return taps.tap(self, "out", h + x)


class SelfAttention(nn.Module):
    """Self-attention of image tokens; queries, keys and values have no bias."""

    heads: int
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "b n c"]) -> Float[Array, "b n c"]:
        q, k, v = attention.qkv_heads(x, self.heads, self.dtype, fan_in, use_bias=False)
        taps.tap_heads(self, q=q, k=k, v=v)
        gathered = attention.attend(q, k, v)
        return taps.tap(self, "out", attention.merge_heads(gathered, x.shape[-1], self.dtype, fan_in))


class GatedMLP(nn.Module):
    """GEGLU: values times the exact GELU of gates, both from one kernel [c, 2, 4 c], then Dense back to c."""

    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "b n c"]) -> Float[Array, "b n c"]:
        c = x.shape[-1]
        h = nn.DenseGeneral((2, 4 * c), kernel_init=fan_in, dtype=self.dtype, name="in")(x)
        h = taps.tap(self, "inner", h[:, :, 0] * nn.gelu(h[:, :, 1], approximate=False))
        return taps.tap(self, "out", nn.Dense(c, kernel_init=fan_in, dtype=self.dtype, name="out")(h))


class TransformerBlock(nn.Module):
    """Pre-norm self-attention, cross-attention and MLP with residual connections."""

    heads: int
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(
        self, x: Float[Array, "b n c"], text: Float[Array, "b l d"], mask: Bool[Array, "b l"] | None
    ) -> Float[Array, "b n c"]:
        def norm(x: Array, name: str) -> Array:
            norm = nn.LayerNorm(epsilon=1e-5, dtype=self.dtype, use_fast_variance=False, name=name)
            return taps.tap(self, name, norm(x))

        h = SelfAttention(self.heads, self.dtype, name="self_attention")(norm(x, "norm0"))
        x = taps.tap(self, "res_self", x + h)
        cross = attention.CrossAttention(self.heads, False, fan_in, fan_in, self.dtype, name="cross_attention")
        h = cross(norm(x, "norm1"), text, mask)
        x = taps.tap(self, "res_cross", x + h)
        return taps.tap(self, "out", x + GatedMLP(self.dtype, name="mlp")(norm(x, "norm2")))


class Transformer(nn.Module):
    """Transformer blocks over the pixels of a feature map."""

    depth: int
    heads: int
    groups: int = 32
    dtype: Dtype = jnp.float32
    remat: bool | str = False  # or one of stacks.REMAT

    @nn.compact
    def __call__(
        self, x: Float[Array, "b h w c"], text: Float[Array, "b l d"], mask: Bool[Array, "b l"] | None
    ) -> Float[Array, "b h w c"]:
        b, height, width, c = x.shape
        block = stacks.rematerialised(TransformerBlock, self.remat)
        normed = taps.tap(self, "norm", _group_norm(x, self.groups, 1e-6, self.dtype, "norm"))
        tokens = normed.reshape(b, height * width, c)
        tokens = nn.Dense(c, kernel_init=fan_in, dtype=self.dtype, name="in")(tokens)
        for i in range(self.depth):
            tokens = block(self.heads, self.dtype, name=f"block{i}")(tokens, text, mask)
        tokens = nn.Dense(c, kernel_init=initializers.zeros, dtype=self.dtype, name="out")(tokens)
        return taps.tap(self, "out", x + taps.tap(self, "increment", tokens.reshape(x.shape)))


class LatentUNet(nn.Module):
    """The UNet of Stable Diffusion; the defaults are version 1, `SIZES` has the others.

    `noise_label` is the DDPM timestep, 0 to 999. cond needs `text` [b l text_dim]; `text_mask` [b l] hides padding.
    pooled_dim > 0 (SDXL) needs `pooled` [b pooled_dim]; sizes > 0 needs `sizes` [b sizes], for SDXL
    (original height, width, crop top, left, target height, width) in pixels. Attention has `heads` heads at every
    level, or heads of `head_width` channels; set the other to 0. num_classes > 0 makes the network class-conditional:
    cond takes `label` instead of text, embedded as `class_tokens` tokens of text_dim channels. step_embed = "zero" or
    "reference" adds cond["step"] to the embedding, `control` adds control metadata. `loop` selects convolution
    gradients that are fast inside loops on CPU: see `convolution.loop_conv`.
    """

    channels: int = 4
    width: int = 320
    channel_mult: tuple[int, ...] = (1, 2, 4, 4)
    blocks: int = 2
    depths: tuple[int, ...] = (1, 1, 1, 0)  # transformer blocks after each residual block, per level
    mid_depth: int = 1
    heads: int = 8
    head_width: int = 0
    groups: int = 32  # of the group norms
    text_dim: int = 768
    pooled_dim: int = 0
    num_classes: int = 0
    class_tokens: int = 1
    control: conditioning.Control | None = None
    sizes: int = 0
    size_width: int = 256  # of the sinusoidal embedding of each size
    linear: bool = False  # public files store the transformers' projections as Dense, not as 1x1 convolutions
    dropout: float = 0.0
    step_embed: str = ""
    loop: bool = False
    dtype: Dtype = jnp.float32
    remat: bool | str = False  # or one of stacks.REMAT
    scalars: tuple[str, ...] = ()  # further scalar conditions, embedded as zero at initialisation, as ("tau",)

    published = DDPM("sqrt_linear")

    @nn.nowrap
    def signals(self) -> dict[str, Signal]:
        """What it is conditioned on."""
        sizes = {"sizes": Signal((self.sizes,), group=CONTROL, required=False)} if self.sizes else {}
        return conditioning.signals(self, **sizes)

    @nn.compact
    def __call__(
        self, x: Float[Array, "b h w c"], noise_label: ArrayLike, cond: Cond = None, *, deterministic: bool = True
    ) -> Float[Array, "b h w c"]:
        cond = cond or {}
        self._check(x, cond)
        e = self._embed(x, noise_label, cond)
        if self.num_classes:
            text = conditioning.class_tokens(self, x, cond, self.text_dim)
        else:
            text = jnp.asarray(cond["text"])
        mask = jnp.asarray(cond["text_mask"], bool) if "text_mask" in cond else None
        block = stacks.rematerialised(Block, self.remat)
        shared: dict[str, Any] = {"groups": self.groups, "dtype": self.dtype}
        fields = {**shared, "dropout": self.dropout, "deterministic": deterministic, "loop": self.loop}

        def run(x: Array, stage: str, i: int, features: int, depth: int) -> Array:
            x = block(features, name=f"{stage}_block{i}", **fields)(x, e)
            if not depth:
                return x
            heads, name = self._heads(features), f"{stage}_transformer{i}"
            return Transformer(depth, heads, remat=self.remat, name=name, **shared)(x, text, mask)

        x, skips = self._encode(run, taps.tap(self, "in", x).astype(self.dtype))
        x = run(x, "mid", 0, x.shape[-1], self.mid_depth)
        x = run(x, "mid", 1, x.shape[-1], 0)
        x = nn.silu(_group_norm(self._decode(run, x, skips), self.groups, 1e-5, self.dtype, "out_norm"))
        x = _conv(x.astype(jnp.float32), self.channels, "out_conv", loop=self.loop, kernel_init=initializers.zeros)
        return taps.tap(self, "out", x)

    def _embed(self, x: Array, noise_label: ArrayLike, cond: Mapping[str, ArrayLike]) -> Array:
        features = 4 * self.width
        parts = []
        if self.pooled_dim and not self.num_classes:
            parts.append(jnp.asarray(cond["pooled"], jnp.float32))
        if self.sizes:
            sizes = jnp.asarray(cond["sizes"], jnp.float32)
            parts.append(embeddings.sinusoid(sizes.reshape(-1), self.size_width).reshape(sizes.shape[0], -1))
        added = []
        if parts:
            added = [embeddings.EmbedMLP(features, name="added")(jnp.concatenate(parts, axis=-1))]
        e = conditioning.embed(self, x, noise_label, cond, features, *added, frequencies=self.width)
        return nn.silu(e)

    def _encode(self, run: Callable[..., Array], x: Array) -> tuple[Array, list[Array]]:
        x = taps.tap(self, "embedded", _conv(x, self.width, "in_conv", loop=self.loop, dtype=self.dtype))
        skips = [x]
        for level, (multiplier, depth) in enumerate(zip(self.channel_mult, self.depths, strict=True)):
            if level:
                x = taps.tap(self, f"down{level - 1}_conv", self._halve(x, f"down{level - 1}_conv"))
                skips.append(x)
            for i in range(self.blocks):
                x = run(x, f"down{level}", i, multiplier * self.width, depth)
                skips.append(x)
        return x, skips

    def _halve(self, x: Array, name: str) -> Array:
        """A convolution of stride 2; with `loop`, every second pixel of one of stride 1, whose gradients are fast."""
        if self.loop:
            return _conv(x, x.shape[-1], name, loop=True, dtype=self.dtype)[:, ::2, ::2]
        return _conv(x, x.shape[-1], name, loop=False, dtype=self.dtype, strides=2)

    def _decode(self, run: Callable[..., Array], x: Array, skips: list[Array]) -> Array:
        for level in reversed(range(len(self.channel_mult))):
            for i in range(self.blocks + 1):
                x = jnp.concatenate([x, skips.pop()], axis=-1)
                x = run(x, f"up{level}", i, self.channel_mult[level] * self.width, self.depths[level])
            if level:
                x = _conv(convolution.upsample(x), x.shape[-1], f"up{level}_conv", loop=self.loop, dtype=self.dtype)
                taps.tap(self, f"up{level}_conv", x)
        return x

    def _heads(self, features: int) -> int:
        if self.heads < 0 or self.head_width < 0 or bool(self.heads) == bool(self.head_width):
            raise ValueError(
                f"set either heads (heads per level) or head_width (channels per head) of LatentUNet, and the "
                f"other to 0; got heads={self.heads}, head_width={self.head_width}"
            )
        size = self.heads or self.head_width
        if features % size:
            field = "heads" if self.heads else "head_width"
            raise ValueError(
                f"{features} channels are not divisible by {field}={size}; choose one that divides every such level"
            )
        return self.heads or features // self.head_width

    def _check(self, x: Array, cond: Mapping[str, ArrayLike]) -> None:
        multiple = 2 ** (len(self.channel_mult) - 1)
        checks.check_inputs("LatentUNet", x, self.channels, multiple, cond, self.signals())
        conditioning.check_alone("LatentUNet", self.control, sizes=self.sizes)
        if len(self.depths) != len(self.channel_mult):
            raise ValueError(
                "LatentUNet needs a depth for each entry of channel_mult (0: no attention), got "
                f"channel_mult={self.channel_mult}, depths={self.depths}"
            )
        if self.width % self.groups:
            raise ValueError(f"width={self.width} is not divisible by groups={self.groups}; set groups to a divisor")
        if not self.num_classes:
            widths = {"pooled": self.pooled_dim} if self.pooled_dim else {}
            conditioning.check_text("LatentUNet", cond, text=self.text_dim, **widths)
        if self.sizes:
            conditioning.check_vectors(f"LatentUNet with sizes={self.sizes}", cond, {"sizes": self.sizes})
