"""DiT (Peebles & Xie 2023): a transformer over latent patches, modulated by timestep and class (adaLN-zero).

c = E_t(t) + E_y(y) [+ control, see conditioning.py];  x = patches W + positions
block: x += gate_a Attn(LN(x) (1 + scale_a) + shift_a);  x += gate_m MLP(LN(x) (1 + scale_m) + shift_m)
the six vectors = Dense(silu(c)), zero-initialised: blocks start as the identity, the output as 0
label_conditioning "token", "cross": instead of E_y in c, tokens of y join the sequence, or x += Cross(x, tokens)
follows Attn
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Dtype
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxdiff.conditions import Cond, Signal
from jaxdiff.conventions import DDPM
from jaxdiff.errors import choose
from jaxdiff.models import attention, checks, conditioning, embeddings, initializers, stacks, taps, transformer

LABEL_CONDITIONING = ("adaln", "token", "cross")  # how the class enters the network

ModulationInput = Array | tuple[Array, Array]  # c [b e], or (c, class tokens [b k d] for cross-attention)

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
    def __call__(
        self, x: Float[Array, "b n d"], c: ModulationInput, bias: Array | None = None, mask: Array | None = None
    ) -> Float[Array, "b n d"]:
        """`bias` and `mask` as in `attention.SelfAttention`."""
        c, tokens = c if isinstance(c, tuple) else (c, None)
        vectors = transformer.Modulation(6, x.shape[-1], name="modulation")(c)
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = vectors
        taps.tap(self, "modulation", lambda: jnp.stack([shift_a, scale_a], axis=1))
        h = taps.tap(self, "norm0", transformer.modulate(x, shift_a, scale_a, self.dtype))
        h = attention.SelfAttention(self.heads, self.dtype, name="attention")(h, bias, mask)
        x = taps.tap(self, "res_self", x + gate_a[:, None].astype(self.dtype) * h)
        if tokens is not None:
            cross = attention.CrossAttention(self.heads, dtype=self.dtype, name="cross_attention")
            x = taps.tap(self, "res_cross", x + cross(x, tokens, None))
        h = taps.tap(self, "norm1", transformer.modulate(x, shift_m, scale_m, self.dtype))
        h = transformer.FeedForward(self.mlp_ratio, self.dtype, name="mlp")(h)
        return taps.tap(self, "out", x + gate_m[:, None].astype(self.dtype) * h)


def embed(model: nn.Module, x: Array, noise_label: ArrayLike, cond: Cond) -> Float[Array, "b e"]:
    """c = E_t [+ control + E_y + E_step]; the class only if it enters through modulation."""
    choose(model.label_conditioning, LABEL_CONDITIONING, "label_conditioning")
    classes = []
    if model.num_classes and model.label_conditioning == "adaln":
        classes = [conditioning.class_embedding(model, x, cond, model.width)]
    return conditioning.embed(model, x, noise_label, cond, model.width, *classes)


class DiT(nn.Module):
    """DiT, by default XL/2 on 4-channel latents with 1000 classes; `DiT(**dit.SIZES["S"], patch=4)` for others.

    `noise_label` is the DDPM timestep, 0..999. cond takes `label` (num_classes: no class). With learn_variance the
    output has twice the channels, the second half being variance logits, as in the published checkpoints. `grid` is
    the side of the token grid it was trained on: positions at other sizes are resampled as `positions` says
    (interpolate, extrapolate, bicubic); 0: positions count tokens. step_embed = "zero" or "reference" adds cond["step"]
    to the modulation, `control` adds control metadata. `label_conditioning` is how the class enters: adaln (the
    published form), token (`class_tokens` extra tokens in the sequence) or cross (cross-attention).
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
    label_conditioning: str = "adaln"
    class_tokens: int = 1
    control: conditioning.Control | None = None
    step_embed: str = ""
    dtype: Dtype = jnp.float32
    remat: bool | str = False  # or one of stacks.REMAT
    scan: bool = False
    scalars: tuple[str, ...] = ()  # further scalar conditions, embedded as zero at initialisation, as ("tau",)

    published = DDPM()

    @nn.nowrap
    def signals(self) -> dict[str, Signal]:
        """What it is conditioned on."""
        return conditioning.signals(self)

    @nn.compact
    def __call__(
        self, x: Float[Array, "b h w c"], noise_label: ArrayLike, cond: Cond = None, *, deterministic: bool = True
    ) -> Float[Array, "b h w k"]:
        checks.check_inputs("DiT", x, self.channels, self.patch, cond, self.signals())
        _, height, width, _ = x.shape
        c = embed(self, x, noise_label, cond)
        tokens = transformer.patchify(taps.tap(self, "in", x), self.patch)
        tokens = nn.Dense(self.width, kernel_init=initializers.xavier, dtype=self.dtype, name="patches")(tokens)
        rows, columns = height // self.patch, width // self.patch
        positions = embeddings.sincos_positions(rows, columns, self.width, self.grid, self.positions)
        tokens = taps.tap(self, "embedded", tokens + jnp.asarray(positions.reshape(-1, self.width), self.dtype))
        count = tokens.shape[1]
        modulation: ModulationInput = c
        if self.num_classes and self.label_conditioning != "adaln":
            classes = conditioning.class_tokens(self, x, cond, self.width)
            if self.label_conditioning == "token":
                tokens = jnp.concatenate([tokens, classes], axis=1)
            else:
                modulation = c, classes
        fields: dict[str, Any] = {"heads": self.heads, "mlp_ratio": self.mlp_ratio, "dtype": self.dtype}
        tokens = stacks.block_stack(Block, self.depth, scan=self.scan, remat=self.remat, **fields)(tokens, modulation)
        tokens = tokens[:, :count]
        out = transformer.FinalLayer(self.patch**2 * self.channels * (1 + self.learn_variance), name="final")(tokens, c)
        return taps.tap(self, "out", transformer.unpatchify(out, self.patch, height, width))
