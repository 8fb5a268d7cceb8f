"""DiT (Peebles & Xie 2023): a transformer over latent patches, modulated by timestep and class (adaLN-zero).

c = E_t(t) + E_y(y) [+ control, see conditioning.py];  x = patches W + positions
block: x += gate_a Attn(LN(x) (1 + scale_a) + shift_a);  x += gate_m MLP(LN(x) (1 + scale_m) + shift_m)
the six vectors = Dense(silu(c)), zero at the start, so blocks begin as the identity and the output as 0
semantic "token", "cross": instead of E_y in c, tokens of y join the sequence, or x += Cross(x, tokens) after Attn
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jaxdiff.errors import pick
from jaxdiff.models import conditioning, layers
from jaxdiff.models.layers import Cond, Dtype

SEMANTIC = {"adaln": 0, "token": 0, "cross": 0}  # how the class enters

SIZES = {
    "S": {"depth": 12, "width": 384, "heads": 6},
    "B": {"depth": 12, "width": 768, "heads": 12},
    "L": {"depth": 24, "width": 1024, "heads": 16},
    "XL": {"depth": 28, "width": 1152, "heads": 16},
}


class Block(nn.Module):
    """Self-attention and MLP, each modulated and gated by c."""

    heads: int
    mlp_ratio: float = 4.0
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "b n d"], c: Any, bias: Any = None, mask: Any = None) -> Float[Array, "b n d"]:
        """c [b e], or (c, tokens [b k d] to attend to); bias and mask: as `layers.SelfAttention` takes them."""
        c, tokens = c if isinstance(c, tuple) else (c, None)
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = layers.Modulation(6, x.shape[-1], name="modulation")(c)
        h = layers.tap(self, "norm0", layers.modulate(x, shift_a, scale_a, self.dtype))
        h = layers.SelfAttention(self.heads, self.dtype, name="attention")(h, bias, mask)
        x = layers.tap(self, "res_self", x + gate_a[:, None].astype(self.dtype) * h)
        if tokens is not None:
            cross = layers.CrossAttention(self.heads, dtype=self.dtype, name="cross_attention")
            x = layers.tap(self, "res_cross", x + cross(x, tokens, None))
        h = layers.tap(self, "norm1", layers.modulate(x, shift_m, scale_m, self.dtype))
        h = layers.MLP(self.mlp_ratio, self.dtype, name="mlp")(h)
        return layers.tap(self, "out", x + gate_m[:, None].astype(self.dtype) * h)


def embed(model: Any, x: Array, noise_label: Any, cond: Cond) -> Float[Array, "b e"]:
    """c = E_t [+ control + E_y + E_step], made of layers of the model that calls it while it is compact."""
    pick(SEMANTIC, model.semantic, "semantic")
    times = layers.noise_labels(noise_label, x)
    c = layers.EmbedMLP(model.width, name="time")(layers.sinusoid(times, 256))
    if model.control:
        c = c + conditioning.ControlEmbed(model.width, model.control, name="control_embed")(times, cond)
    if model.num_classes and model.semantic == "adaln":
        label = (cond or {}).get("label", jnp.full(x.shape[:1], model.num_classes))
        init = nn.initializers.normal(0.02)
        c = c + nn.Embed(model.num_classes + 1, model.width, embedding_init=init, name="label")(label)
    if model.step_embed:
        c = c + layers.StepEmbed(model.width, model.step_embed, name="step")(x, cond)
    return c


class DiT(nn.Module):
    """DiT, by default XL/2 on 4-channel latents with 1000 classes; `DiT(**dit.SIZES["S"], patch=4)` for others.

    `noise_label` is the DDPM timestep 0..999. cond takes `label` (num_classes = none given). With learn_variance
    the output has twice the channels, the second half being variance logits, as in the published checkpoints.
    `grid` is the side of the token grid it was trained on: positions of other sizes are resampled onto it, as
    `positions` says: interpolate, extrapolate or bicubic (0: positions count tokens).
    step_embed = "zero" or "reference" adds the condition `step` to the modulation.
    `semantic` is how the class enters: adaln (the published form), or by attention, token (`class_tokens` more in the
    sequence) or cross. `control` adds the condition of that name to the modulation.
    """

    channels: int = 4
    patch: int = 2
    depth: int = 28
    width: int = 1152
    heads: int = 16
    mlp_ratio: float = 4.0
    num_classes: int = 1000
    learn_variance: bool = True
    grid: int = 0
    positions: str = "interpolate"
    semantic: str = "adaln"
    class_tokens: int = 1
    control: conditioning.Control | None = None
    step_embed: str = ""
    dtype: Dtype = jnp.float32
    remat: bool | str = False  # or one of layers.REMAT
    scan: bool = False

    @nn.compact
    def __call__(
        self, x: Float[Array, "b h w c"], noise_label: Any, cond: Cond = None, *, deterministic: bool = True
    ) -> Float[Array, "b h w k"]:
        keys = ("label",) * bool(self.num_classes) + ("control",) * bool(self.control)
        keys += ("step",) * bool(self.step_embed)
        layers.check_inputs("DiT", x, self.channels, self.patch, cond, keys)
        _, height, width, _ = x.shape
        c = embed(self, x, noise_label, cond)
        tokens = layers.patchify(layers.tap(self, "in", x), self.patch)
        tokens = nn.Dense(self.width, kernel_init=layers.xavier, dtype=self.dtype, name="patches")(tokens)
        rows, columns = height // self.patch, width // self.patch
        positions = layers.sincos_positions(rows, columns, self.width, self.grid, self.positions)
        tokens = layers.tap(self, "embedded", tokens + jnp.asarray(positions.reshape(-1, self.width), self.dtype))
        count = tokens.shape[1]
        shared: Any = c
        if self.num_classes and self.semantic != "adaln":
            classes = conditioning.class_tokens(self, x, cond, self.width)
            if self.semantic == "token":
                tokens = jnp.concatenate([tokens, classes], axis=1)
            else:
                shared = c, classes
        fields = {"heads": self.heads, "mlp_ratio": self.mlp_ratio, "dtype": self.dtype}
        tokens = layers.block_stack(Block, self.depth, scan=self.scan, remat=self.remat, **fields)(tokens, shared)
        tokens = tokens[:, :count]
        out = layers.FinalLayer(self.patch**2 * self.channels * (1 + self.learn_variance), name="final")(tokens, c)
        return layers.tap(self, "out", layers.unpatchify(out, self.patch, height, width))
