"""PixArt-alpha (Chen et al. 2023): a transformer over latent patches with text by cross-attention and adaLN-single.

c = E_t(t) [+ E_s(size, aspect)] [+ control, see conditioning.py];  text = E_y(tokens)
six vectors m = Dense(silu(c)), shared by all blocks
block: shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = T + m, with a table T of its own
       x += gate_a Attn(LN(x) (1 + scale_a) + shift_a);  x += Cross(x, text)
       x += gate_m MLP(LN(x) (1 + scale_m) + shift_m)
final: shift, scale = T' + c;  the output is 0 at the start through its zero Dense
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jaxdiff.models import conditioning, dit, layers
from jaxdiff.models.layers import Cond, Dtype

SIZES = dit.SIZES
CONTROLS = {"original_size": 2, "aspect": 1}  # what size_embed takes, and how many numbers of each

small = nn.initializers.normal(0.02)


def _table(module: nn.Module, rows: int, width: int) -> Float[Array, "rows width"]:
    return module.param("table", nn.initializers.normal(width**-0.5), (rows, width))


class Block(nn.Module):
    """Self-attention, cross-attention, MLP. shared: `vectors` [b 6 d], `text` [b l d], its `mask` [b l] or None."""

    heads: int
    mlp_ratio: float = 4.0
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "b n d"], shared: dict[str, Any]) -> Float[Array, "b n d"]:
        vectors = _table(self, 6, x.shape[-1]) + shared["vectors"]
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = (vectors[:, i] for i in range(6))
        h = layers.tap(self, "norm0", layers.modulate(x, shift_a, scale_a, self.dtype))
        h = layers.SelfAttention(self.heads, self.dtype, name="attention")(h)
        x = layers.tap(self, "res_self", x + gate_a[:, None].astype(self.dtype) * h)
        cross = layers.CrossAttention(self.heads, dtype=self.dtype, name="cross_attention")
        x = layers.tap(self, "res_cross", x + cross(x, shared["text"], shared["mask"]))
        h = layers.tap(self, "norm1", layers.modulate(x, shift_m, scale_m, self.dtype))
        h = layers.MLP(self.mlp_ratio, self.dtype, name="mlp")(h)
        return layers.tap(self, "out", x + gate_m[:, None].astype(self.dtype) * h)


class TextMLP(nn.Module):
    """Text tokens to the width of the image's: Dense, tanh-GELU, Dense."""

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
        x = layers.modulate(x, table[0] + c, table[1] + c, jnp.float32)
        return nn.Dense(self.features, kernel_init=layers.zeros, name="out")(x)


class PixArt(nn.Module):
    """PixArt-alpha, by default XL/2 on 4-channel latents with T5 text; `SIZES` as DiT's.

    `noise_label` is the DDPM timestep 0..999. cond needs `text` [b l text_dim]; `text_mask` [b l] hides padding.
    null_tokens > 0 keeps that many tokens of a null text as a constant parameter, 120 in the published checkpoints: it
    stands in where there is no text, or where the mask hides a whole prompt, so null={"text_mask": False} guides and
    drops. Without it the null condition is the empty prompt's embedding. size_embed (the 1024-pixel model) needs
    `control` = {"original_size": [b 2] height and width, "aspect": [b 1] height / width}. learn_variance, grid,
    positions, control and step_embed are as in `DiT`; the published 1024-pixel model has grid=32, the others count
    tokens. num_classes > 0 makes a network of classes: cond takes `label` instead of text, as `class_tokens` tokens.
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
    remat: bool | str = False  # or one of layers.REMAT
    scan: bool = False

    @nn.compact
    def __call__(
        self, x: Float[Array, "b h w c"], noise_label: Any, cond: Cond = None, *, deterministic: bool = True
    ) -> Float[Array, "b h w k"]:
        cond = cond or {}
        self._check(x, cond)
        _, height, width, _ = x.shape
        c = self._embed(x, noise_label, cond)
        vectors = jnp.stack(layers.Modulation(6, self.width, small, name="modulation")(c), axis=1)
        if self.num_classes:
            text, mask = conditioning.class_tokens(self, x, cond, self.width), None
        else:
            text, mask = self._text(x.shape[0], cond)
            text = TextMLP(self.width, self.dtype, name="text_mlp")(text)
        tokens = layers.patchify(layers.tap(self, "in", x), self.patch)
        tokens = nn.Dense(self.width, kernel_init=layers.xavier, dtype=self.dtype, name="patches")(tokens)
        rows, columns = height // self.patch, width // self.patch
        positions = layers.sincos_positions(rows, columns, self.width, self.grid, self.positions)
        tokens = layers.tap(self, "embedded", tokens + jnp.asarray(positions.reshape(-1, self.width), self.dtype))
        fields = {"heads": self.heads, "mlp_ratio": self.mlp_ratio, "dtype": self.dtype}
        stack = layers.block_stack(Block, self.depth, scan=self.scan, remat=self.remat, **fields)
        tokens = stack(tokens, {"vectors": vectors, "text": text, "mask": mask})
        out = FinalLayer(self.patch**2 * self.channels * (1 + self.learn_variance), name="final")(tokens, c)
        return layers.tap(self, "out", layers.unpatchify(out, self.patch, height, width))

    def _embed(self, x: Array, noise_label: Any, cond: Mapping[str, Any]) -> Float[Array, "b d"]:
        times = layers.noise_labels(noise_label, x)
        c = layers.EmbedMLP(self.width, name="time")(layers.sinusoid(times, 256))
        if self.control:
            c = c + conditioning.ControlEmbed(self.width, self.control, name="control_embed")(times, cond)
        if self.size_embed:
            parts = []
            for name in CONTROLS:
                values = jnp.asarray(cond["control"][name], jnp.float32)
                embedded = layers.EmbedMLP(self.width // 3, name=name)(layers.sinusoid(values.reshape(-1), 256))
                parts.append(embedded.reshape(values.shape[0], -1))
            c = c + jnp.concatenate(parts, axis=-1)
        if self.step_embed:
            c = c + layers.StepEmbed(self.width, self.step_embed, name="step")(x, cond)
        return c

    def _text(self, batch: int, cond: Mapping[str, Any]) -> tuple[Array, Array | None]:
        """The text tokens and their mask, the null text put where there is no other."""
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

    def _check(self, x: Array, cond: Mapping[str, Any]) -> None:
        keys: tuple[str, ...] = ("label",) if self.num_classes else ("text", "text_mask")
        keys += ("control",) * (self.size_embed or bool(self.control)) + ("step",) * bool(self.step_embed)
        layers.check_inputs("PixArt", x, self.channels, self.patch, cond, keys)
        conditioning.check_alone("PixArt", self.control, size_embed=self.size_embed)
        if self.size_embed and self.width % 3:
            raise ValueError(f"PixArt with size_embed needs a width that 3 divides, got {self.width}")
        if not self.num_classes:
            self._check_text(cond)
        if self.size_embed:
            self._check_control(jax.tree.map(jnp.shape, cond.get("control")))

    def _check_text(self, cond: Mapping[str, Any]) -> None:
        if "text" not in cond and not (self.null_tokens and "text_mask" not in cond):
            raise ValueError(
                "PixArt needs cond['text']; its null condition is the empty prompt's embedding, so guide with "
                "guided(denoise, scale, null={'text': ...}), or build it with null_tokens=120 to keep a null text"
            )
        if "text" not in cond:
            return
        conditioning.check_texts("PixArt", cond, text=self.text_dim)
        count = jnp.shape(cond["text"])[1]
        if self.null_tokens and count > self.null_tokens:
            raise ValueError(
                f"PixArt with null_tokens={self.null_tokens} takes at most so many text tokens, got {count}; "
                "cut the text, or build it with more"
            )

    def _check_control(self, shapes: Any) -> None:
        given = shapes if isinstance(shapes, Mapping) else {}
        if {name: shape[1:] for name, shape in given.items()} != {name: (n,) for name, n in CONTROLS.items()}:
            wanted = ", ".join(f"{name!r}: [b, {n}]" for name, n in CONTROLS.items())
            raise ValueError(f"PixArt with size_embed needs cond['control'] = {{{wanted}}}, got {shapes or 'none'}")
