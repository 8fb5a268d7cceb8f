"""PixArt-alpha (Chen et al. 2023): a transformer over latent patches with cross-attention to text and adaLN-single.

c = E_t(t) [+ E_s(size, aspect)] [+ control, see conditioning.py];  text = E_y(tokens)
six vectors m = Dense(silu(c)), shared by all blocks
block: shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = T + m, T a table of the block
       x += gate_a Attn(LN(x) (1 + scale_a) + shift_a);  x += Cross(x, text)
       x += gate_m MLP(LN(x) (1 + scale_m) + shift_m)
final: shift, scale = T' + c;  the output Dense is zero-initialised
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Dtype
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxdiff.conditions import CONTROL, Cond, Signal
from jaxdiff.conventions import DDPM
from jaxdiff.models import attention, checks, conditioning, dit, embeddings, initializers, stacks, taps, transformer

SIZES = dit.SIZES
SIZE_SIGNALS = {
    "original_size": 2,
    "aspect_ratio": 1,
}  # inputs of size_embed: height and width in pixels; height / width

small = nn.initializers.normal(0.02)


def _table(module: nn.Module, rows: int, width: int) -> Float[Array, "rows width"]:
    return module.param("table", nn.initializers.normal(width**-0.5), (rows, width))


class Shared(NamedTuple):
    """Inputs that all blocks have in common."""

    vectors: Array  # of the modulation [b 6 d]
    text: Array  # [b l d]
    mask: Array | None  # of the text [b l]


class Block(nn.Module):
    """Self-attention, cross-attention, MLP."""

    heads: int
    mlp_ratio: float = 4.0
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "b n d"], shared: Shared) -> Float[Array, "b n d"]:
        vectors = _table(self, 6, x.shape[-1]) + shared.vectors
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = (vectors[:, i] for i in range(6))
        taps.tap(self, "modulation", lambda: jnp.stack([shift_a, scale_a], axis=1))
        h = taps.tap(self, "norm0", transformer.modulate(x, shift_a, scale_a, self.dtype))
        h = attention.SelfAttention(self.heads, self.dtype, name="attention")(h)
        x = taps.tap(self, "res_self", x + gate_a[:, None].astype(self.dtype) * h)
        cross = attention.CrossAttention(self.heads, dtype=self.dtype, name="cross_attention")
        x = taps.tap(self, "res_cross", x + cross(x, shared.text, shared.mask))
        h = taps.tap(self, "norm1", transformer.modulate(x, shift_m, scale_m, self.dtype))
        h = transformer.FeedForward(self.mlp_ratio, self.dtype, name="mlp")(h)
        return taps.tap(self, "out", x + gate_m[:, None].astype(self.dtype) * h)


class TextMLP(nn.Module):
    """Projects text tokens to the width of image tokens: Dense, tanh-GELU, Dense."""

    features: int
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, text: Float[Array, "b l e"]) -> Float[Array, "b l d"]:
        text = nn.Dense(self.features, kernel_init=small, dtype=self.dtype, name="in")(text)
        return nn.Dense(self.features, kernel_init=small, dtype=self.dtype, name="out")(nn.gelu(text))


class FinalLayer(nn.Module):
    """A norm modulated by a table plus c itself, then a zero-initialised Dense to patches, in float32."""

    features: int

    @nn.compact
    def __call__(self, x: Float[Array, "b n d"], c: Float[Array, "b d"]) -> Float[Array, "b n f"]:
        table = _table(self, 2, x.shape[-1])
        x = transformer.modulate(x, table[0] + c, table[1] + c, jnp.float32)
        return nn.Dense(self.features, kernel_init=initializers.zeros, name="out")(x)


class PixArt(nn.Module):
    """PixArt-alpha, by default XL/2 on 4-channel latents with T5 text; `SIZES` are those of DiT.

    `noise_label` is the DDPM timestep 0..999. cond needs `text` [b l text_dim]; `text_mask` [b l] hides padding.
    null_tokens > 0 stores a null text of that many tokens as a constant parameter, 120 in the published checkpoints: it
    replaces a missing text, or a fully masked prompt, so null={"text_mask": False} serves guidance and dropout. With
    null_tokens = 0 the null condition is the empty prompt's embedding. size_embed (the 1024-pixel model) needs
    `original_size` [b 2], height and width in pixels, and `aspect_ratio` [b 1], height / width. learn_variance, grid,
    positions, control and step_embed are as in `DiT`; the published 1024-pixel model has grid=32, the others count
    tokens. num_classes > 0 makes the network class-conditional: cond takes `label` instead of text.
    """

    channels: int = 4
    patch: int = 2
    depth: int = 28
    width: int = 1152
    heads: int = 16
    mlp_ratio: float = 4.0
    text_dim: int = 4096
    null_tokens: int = 0
    num_classes: int = 0
    class_tokens: int = 1
    control: conditioning.Control | None = None
    size_embed: bool = False
    learn_variance: bool = True
    grid: int = 0
    positions: str = "interpolate"
    step_embed: str = ""
    dtype: Dtype = jnp.float32
    remat: bool | str = False  # or one of stacks.REMAT
    scan: bool = False
    scalars: tuple[str, ...] = ()  # further scalar conditions, embedded as zero at initialisation, as ("tau",)

    published = DDPM()

    @nn.nowrap
    def signals(self) -> dict[str, Signal]:
        """What it is conditioned on."""
        sizes = {name: Signal((n,), group=CONTROL, required=False) for name, n in SIZE_SIGNALS.items()}
        if not self.size_embed:
            return conditioning.signals(self)
        return conditioning.signals(self, **sizes)

    @nn.compact
    def __call__(
        self, x: Float[Array, "b h w c"], noise_label: ArrayLike, cond: Cond = None, *, deterministic: bool = True
    ) -> Float[Array, "b h w k"]:
        cond = cond or {}
        self._check(x, cond)
        _, height, width, _ = x.shape
        c = self._embed(x, noise_label, cond)
        vectors = jnp.stack(transformer.Modulation(6, self.width, small, name="modulation")(c), axis=1)
        if self.num_classes:
            text, mask = conditioning.class_tokens(self, x, cond, self.width), None
        else:
            text, mask = self._text(x.shape[0], cond)
            text = TextMLP(self.width, self.dtype, name="text_mlp")(text)
        tokens = transformer.patchify(taps.tap(self, "in", x), self.patch)
        tokens = nn.Dense(self.width, kernel_init=initializers.xavier, dtype=self.dtype, name="patches")(tokens)
        rows, columns = height // self.patch, width // self.patch
        positions = embeddings.sincos_positions(rows, columns, self.width, self.grid, self.positions)
        tokens = taps.tap(self, "embedded", tokens + jnp.asarray(positions.reshape(-1, self.width), self.dtype))
        fields: dict[str, Any] = {"heads": self.heads, "mlp_ratio": self.mlp_ratio, "dtype": self.dtype}
        stack = stacks.block_stack(Block, self.depth, scan=self.scan, remat=self.remat, **fields)
        tokens = stack(tokens, Shared(vectors, text, mask))
        out = FinalLayer(self.patch**2 * self.channels * (1 + self.learn_variance), name="final")(tokens, c)
        return taps.tap(self, "out", transformer.unpatchify(out, self.patch, height, width))

    def _embed(self, x: Array, noise_label: ArrayLike, cond: Mapping[str, ArrayLike]) -> Float[Array, "b d"]:
        sizes = []
        if self.size_embed:
            parts = []
            for name, parameters in zip(SIZE_SIGNALS, ("original_size", "aspect"), strict=True):
                values = jnp.asarray(cond[name], jnp.float32)
                waves = embeddings.sinusoid(values.reshape(-1), 256)
                embedded = embeddings.EmbedMLP(self.width // 3, name=parameters)(waves)
                parts.append(embedded.reshape(values.shape[0], -1))
            sizes = [jnp.concatenate(parts, axis=-1)]
        return conditioning.embed(self, x, noise_label, cond, self.width, *sizes)

    def _text(self, batch: int, cond: Mapping[str, ArrayLike]) -> tuple[Array, Array | None]:
        """The text tokens and their mask, with the null text where there is none."""
        text = jnp.asarray(cond["text"]) if "text" in cond else None
        mask = jnp.asarray(cond["text_mask"], bool) if "text_mask" in cond else None
        if not self.null_tokens:
            return text, mask  # type: ignore[return-value]  # checked: there is text
        init = nn.initializers.normal(self.text_dim**-0.5)
        null = jax.lax.stop_gradient(self.param("null_text", init, (self.null_tokens, self.text_dim)))
        if text is None:
            return jnp.broadcast_to(null, (batch, *null.shape)), None
        if mask is None:
            return text, None
        room = self.null_tokens - text.shape[1]
        text, mask = jnp.pad(text, ((0, 0), (0, room), (0, 0))), jnp.pad(mask, ((0, 0), (0, room)))
        some = mask.any(axis=1, keepdims=True)
        return jnp.where(some[..., None], text, null.astype(text.dtype)), mask | ~some

    # ------------------------------------------------------------------------------------------ messages

    def _check(self, x: Array, cond: Mapping[str, ArrayLike]) -> None:
        checks.check_inputs("PixArt", x, self.channels, self.patch, cond, self.signals())
        conditioning.check_alone("PixArt", self.control, size_embed=self.size_embed)
        if self.size_embed and self.width % 3:
            raise ValueError(f"PixArt with size_embed needs a width divisible by 3, got {self.width}")
        if not self.num_classes:
            self._check_text(cond)
        if self.size_embed:
            conditioning.check_vectors("PixArt with size_embed", cond, SIZE_SIGNALS)

    def _check_text(self, cond: Mapping[str, ArrayLike]) -> None:
        if "text" not in cond and not (self.null_tokens and "text_mask" not in cond):
            raise ValueError(
                "PixArt needs cond['text']; its null condition is the empty prompt's embedding, so guide with "
                "guided(denoise, scale, null={'text': ...}), or build it with null_tokens=120 to store a null text"
            )
        if "text" not in cond:
            return
        conditioning.check_text("PixArt", cond, text=self.text_dim)
        count = jnp.shape(cond["text"])[1]
        if self.null_tokens and count > self.null_tokens:
            raise ValueError(
                f"PixArt with null_tokens={self.null_tokens} takes at most that many text tokens, got {count}; "
                "truncate the text, or build it with more"
            )
