"""The text-to-image UNet of latent diffusion (Rombach et al. 2022) in the layouts of Stable Diffusion 1, 2 and SDXL.

    e           silu(E_t(t) + E_a([pooled text, sinusoids of the sizes])); the second term in SDXL alone,
                control (conditioning.py) as a third where asked for
    block       h = conv0(silu(norm0(x))) + e W;  h = conv1(dropout(silu(norm1(h))));  x = h + skip(x)
    transformer z = norm(x) W_in;  depth times z += self(norm0(z)), cross(norm1(z), text), mlp(norm2(z));  x += z W_out
                mlp(z) = (a gelu(g)) W with [a, g] = z V, the exact GELU
    encoder     conv, then per level [halve] (block [transformer]) x blocks; every output is kept
    middle      block, transformer, block
    decoder     per level (block [transformer]) x (blocks + 1) on [x, one kept output] [double]

`SIZES` holds the published layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float

from jaxdiff.models import conditioning, layers
from jaxdiff.models.layers import Cond, Dtype

SIZES: dict[str, dict[str, Any]] = {
    "sd1": {},
    "sd2": {"heads": 0, "head_width": 64, "text_dim": 1024, "linear": True},
    "sdxl": {
        "multipliers": (1, 2, 4), "depths": (0, 2, 10), "mid_depth": 10, "heads": 0, "head_width": 64,
        "text_dim": 2048, "pooled_dim": 1280, "sizes": 6, "linear": True,
    },
}  # fmt: skip

fan_in = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


def _group_norm(x: Array, groups: int, epsilon: float, dtype: Dtype, name: str) -> Array:
    return nn.GroupNorm(groups, epsilon=epsilon, dtype=dtype, use_fast_variance=False, name=name)(x)


def _conv(x: Array, features: int, name: str, *, loop: bool, size: int = 3, **fields: Any) -> Array:
    fields = {"kernel_init": fan_in, "padding": size // 2, **fields}
    if loop:
        fields["conv_general_dilated"] = layers.loop_conv
    return nn.Conv(features, (size, size), name=name, **fields)(x)


class Block(nn.Module):
    """A residual block that the embedding is added into."""

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
        h = conv(nn.silu(layers.tap(self, "norm0", norm(x, name="norm0"))), name="conv0")
        h = h + nn.Dense(self.features, kernel_init=fan_in, dtype=self.dtype, name="embed")(e)[:, None, None]
        h = nn.silu(layers.tap(self, "norm1", norm(h, name="norm1")))
        h = nn.Dropout(self.dropout, deterministic=self.deterministic)(h)
        h = layers.tap(self, "increment", conv(h, name="conv1", kernel_init=layers.zeros))
        skip = x if x.shape[-1] == self.features else layers.tap(self, "skip", conv(x, name="skip", size=1))
        return layers.tap(self, "out", h + skip)


class SelfAttention(nn.Module):
    """Attention of image tokens to each other; queries, keys, values have no bias."""

    heads: int
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "b n c"]) -> Float[Array, "b n c"]:
        q, k, v = layers.qkv_heads(x, self.heads, self.dtype, fan_in, use_bias=False)
        layers.tap_heads(self, q=q, k=k, v=v)
        gathered = layers.attend(q, k, v)
        return layers.tap(self, "out", layers.merge_heads(gathered, x.shape[-1], self.dtype, fan_in))


class GatedMLP(nn.Module):
    """Values times the exact GELU of gates, both 4 c wide from one kernel [c, 2, 4 c], then Dense back to c."""

    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "b n c"]) -> Float[Array, "b n c"]:
        c = x.shape[-1]
        h = nn.DenseGeneral((2, 4 * c), kernel_init=fan_in, dtype=self.dtype, name="in")(x)
        h = layers.tap(self, "inner", h[:, :, 0] * nn.gelu(h[:, :, 1], approximate=False))
        return layers.tap(self, "out", nn.Dense(c, kernel_init=fan_in, dtype=self.dtype, name="out")(h))


class TransformerBlock(nn.Module):
    """Self-attention, cross-attention and MLP, each after a norm and added."""

    heads: int
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(
        self, x: Float[Array, "b n c"], text: Float[Array, "b l d"], mask: Bool[Array, "b l"] | None
    ) -> Float[Array, "b n c"]:
        def norm(x: Array, name: str) -> Array:
            norm = nn.LayerNorm(epsilon=1e-5, dtype=self.dtype, use_fast_variance=False, name=name)
            return layers.tap(self, name, norm(x))

        h = SelfAttention(self.heads, self.dtype, name="self_attention")(norm(x, "norm0"))
        x = layers.tap(self, "res_self", x + h)
        cross = layers.CrossAttention(self.heads, False, fan_in, fan_in, self.dtype, name="cross_attention")
        h = cross(norm(x, "norm1"), text, mask)
        x = layers.tap(self, "res_cross", x + h)
        return layers.tap(self, "out", x + GatedMLP(self.dtype, name="mlp")(norm(x, "norm2")))


class Transformer(nn.Module):
    """Transformer blocks over the pixels of a feature map."""

    depth: int
    heads: int
    groups: int = 32
    dtype: Dtype = jnp.float32
    remat: bool | str = False  # or one of layers.REMAT

    @nn.compact
    def __call__(
        self, x: Float[Array, "b h w c"], text: Float[Array, "b l d"], mask: Bool[Array, "b l"] | None
    ) -> Float[Array, "b h w c"]:
        b, height, width, c = x.shape
        block = layers.rematerialised(TransformerBlock, self.remat)
        normed = layers.tap(self, "norm", _group_norm(x, self.groups, 1e-6, self.dtype, "norm"))
        tokens = normed.reshape(b, height * width, c)
        tokens = nn.Dense(c, kernel_init=fan_in, dtype=self.dtype, name="in")(tokens)
        for i in range(self.depth):
            tokens = block(self.heads, self.dtype, name=f"block{i}")(tokens, text, mask)
        tokens = nn.Dense(c, kernel_init=layers.zeros, dtype=self.dtype, name="out")(tokens)
        return layers.tap(self, "out", x + layers.tap(self, "increment", tokens.reshape(x.shape)))


class LatentUNet(nn.Module):
    """The UNet of Stable Diffusion; the defaults are version 1, `SIZES` has the others.

    `noise_label` is the DDPM timestep, 0 to 999. cond needs `text` [b l text_dim]; `text_mask` [b l] hides padding.
    pooled_dim > 0 (SDXL) needs `pooled` [b pooled_dim]; sizes > 0 needs `control` = {"sizes": [b sizes]}, for SDXL the
    six numbers (original height, width, crop top, left, target height, width) in pixels. Attention has `heads` heads at
    every level, or heads of `head_width` channels: one of the two is 0. num_classes > 0 makes a network of classes:
    cond takes `label` instead of text, as `class_tokens` tokens of text_dim channels. step_embed = "zero" or
    "reference" adds the condition `step` to the embedding, `control` that of its name. `loop` chooses convolution
    gradients that are fast inside loops on CPU: see `layers.loop_conv`.
    """

    channels: int = 4
    width: int = 320
    multipliers: tuple[int, ...] = (1, 2, 4, 4)
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
    size_width: int = 256  # of the sinusoid of each size
    linear: bool = False  # public files store the transformers' projections as Dense, not as 1x1 convolutions
    dropout: float = 0.0
    step_embed: str = ""
    loop: bool = False
    dtype: Dtype = jnp.float32
    remat: bool | str = False  # or one of layers.REMAT

    @nn.compact
    def __call__(
        self, x: Float[Array, "b h w c"], noise_label: Any, cond: Cond = None, *, deterministic: bool = True
    ) -> Float[Array, "b h w c"]:
        cond = cond or {}
        self._check(x, cond)
        e = self._embed(x, noise_label, cond)
        if self.num_classes:
            text = conditioning.class_tokens(self, x, cond, self.text_dim)
        else:
            text = jnp.asarray(cond["text"])
        mask = jnp.asarray(cond["text_mask"], bool) if "text_mask" in cond else None
        block = layers.rematerialised(Block, self.remat)
        shared = {"groups": self.groups, "dtype": self.dtype}
        fields = {**shared, "dropout": self.dropout, "deterministic": deterministic, "loop": self.loop}

        def run(x: Array, stage: str, i: int, features: int, depth: int) -> Array:
            x = block(features, name=f"{stage}_block{i}", **fields)(x, e)
            if not depth:
                return x
            heads, name = self._heads(features), f"{stage}_transformer{i}"
            return Transformer(depth, heads, remat=self.remat, name=name, **shared)(x, text, mask)

        x, skips = self._encode(run, layers.tap(self, "in", x).astype(self.dtype))
        x = run(x, "mid", 0, x.shape[-1], self.mid_depth)
        x = run(x, "mid", 1, x.shape[-1], 0)
        x = nn.silu(_group_norm(self._decode(run, x, skips), self.groups, 1e-5, self.dtype, "out_norm"))
        x = _conv(x.astype(jnp.float32), self.channels, "out_conv", loop=self.loop, kernel_init=layers.zeros)
        return layers.tap(self, "out", x)

    def _embed(self, x: Array, noise_label: Any, cond: Mapping[str, Any]) -> Array:
        features = 4 * self.width
        times = layers.noise_labels(noise_label, x)
        e = layers.EmbedMLP(features, name="time")(layers.sinusoid(times, self.width))
        if self.control:
            e = e + conditioning.ControlEmbed(features, self.control, name="control_embed")(times, cond)
        added = [jnp.asarray(cond["pooled"], jnp.float32)] if self.pooled_dim else []
        if self.sizes:
            sizes = jnp.asarray(cond["control"]["sizes"], jnp.float32)
            added.append(layers.sinusoid(sizes.reshape(-1), self.size_width).reshape(sizes.shape[0], -1))
        if added:
            e = e + layers.EmbedMLP(features, name="added")(jnp.concatenate(added, axis=-1))
        if self.step_embed:
            e = e + layers.StepEmbed(features, self.step_embed, name="step")(x, cond)
        return nn.silu(e)

    def _encode(self, run: Callable[..., Array], x: Array) -> tuple[Array, list[Array]]:
        x = layers.tap(self, "embedded", _conv(x, self.width, "in_conv", loop=self.loop, dtype=self.dtype))
        skips = [x]
        for level, (multiplier, depth) in enumerate(zip(self.multipliers, self.depths, strict=True)):
            if level:
                x = layers.tap(self, f"down{level - 1}_conv", self._halve(x, f"down{level - 1}_conv"))
                skips.append(x)
            for i in range(self.blocks):
                x = run(x, f"down{level}", i, multiplier * self.width, depth)
                skips.append(x)
        return x, skips

    def _halve(self, x: Array, name: str) -> Array:
        """A convolution of stride 2; for loops as every second pixel of one of stride 1, whose gradients are fast."""
        if self.loop:
            return _conv(x, x.shape[-1], name, loop=True, dtype=self.dtype)[:, ::2, ::2]
        return _conv(x, x.shape[-1], name, loop=False, dtype=self.dtype, strides=2)

    def _decode(self, run: Callable[..., Array], x: Array, skips: list[Array]) -> Array:
        for level in reversed(range(len(self.multipliers))):
            for i in range(self.blocks + 1):
                x = jnp.concatenate([x, skips.pop()], axis=-1)
                x = run(x, f"up{level}", i, self.multipliers[level] * self.width, self.depths[level])
            if level:
                x = _conv(layers.upsample(x), x.shape[-1], f"up{level}_conv", loop=self.loop, dtype=self.dtype)
                layers.tap(self, f"up{level}_conv", x)
        return x

    def _heads(self, features: int) -> int:
        if self.heads < 0 or self.head_width < 0 or bool(self.heads) == bool(self.head_width):
            raise ValueError(
                f"LatentUNet takes heads (how many at every level) or head_width (channels of each) and 0 for the "
                f"other, got heads={self.heads}, head_width={self.head_width}"
            )
        size = self.heads or self.head_width
        if features % size:
            field = "heads" if self.heads else "head_width"
            raise ValueError(
                f"{features} channels do not divide by {field}={size}; choose a divisor of every attending level"
            )
        return self.heads or features // self.head_width

    def _check(self, x: Array, cond: Mapping[str, Any]) -> None:
        keys: tuple[str, ...] = ("label",) if self.num_classes else ("text", "text_mask")
        keys += ("pooled",) * bool(self.pooled_dim) + ("control",) * bool(self.sizes or self.control)
        keys += ("step",) * bool(self.step_embed)
        layers.check_inputs("LatentUNet", x, self.channels, 2 ** (len(self.multipliers) - 1), cond, keys)
        conditioning.check_alone("LatentUNet", self.control, sizes=self.sizes)
        if len(self.depths) != len(self.multipliers):
            raise ValueError(
                f"LatentUNet needs a depth for each multiplier (0: no attention), got multipliers={self.multipliers}, "
                f"depths={self.depths}"
            )
        if self.width % self.groups:
            raise ValueError(f"width={self.width} does not divide into groups={self.groups}; set groups to a divisor")
        widths = {} if self.num_classes else {"text": self.text_dim}
        widths |= {"pooled": self.pooled_dim} if self.pooled_dim else {}
        conditioning.check_texts("LatentUNet", cond, **widths)
        if self.sizes:
            self._check_sizes(jax.tree.map(jnp.shape, cond.get("control")))

    def _check_sizes(self, shapes: Any) -> None:
        if not isinstance(shapes, Mapping) or [*shapes] != ["sizes"] or shapes["sizes"][1:] != (self.sizes,):
            raise ValueError(
                f"LatentUNet with sizes={self.sizes} needs cond['control'] = {{'sizes': array of shape "
                f"[b, {self.sizes}]}}, got {shapes or 'none'}"
            )
