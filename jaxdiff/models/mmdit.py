"""MMDiT (Esser et al. 2024, Stable Diffusion 3): image and text streams with their own weights and joint attention.

c = E_t(t) [+ E_p(pooled text)] [+ control, see conditioning.py]
image tokens = patches W + positions;  text tokens = text W, no positions
block: both streams give q, k, v (each modulated by c, q and k optionally RMS-normalised), attend jointly,
       then each adds its gated projection and its gated MLP, as in DiT
the last block reads the text without updating it: two modulation vectors, no projection, no MLP
dual block (Stable Diffusion 3.5 medium, the first `dual` blocks): the image also attends to itself alone, with
       weights and modulation (nine vectors) of its own, gated and added after the joint attention
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Dtype
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxdiff.conditions import Cond, Signal
from jaxdiff.conventions import Flow
from jaxdiff.models import attention, checks, conditioning, dit, embeddings, initializers, stacks, taps, transformer

SIZES = dit.SIZES
Rotary = tuple[Array, Array]  # cosines and sines [n+l d] of the positions of image and text tokens
ModulationInput = Array | tuple[Array, Rotary]  # c [b e], or with rotary positions


class Block(nn.Module):
    """Joint attention of two streams; with `last`, the text stream is read but not updated.

    With `dual`, the image stream also attends to itself. FLUX adds rotary positions to c.
    """

    heads: int
    mlp_ratio: float = 4.0
    qk_norm: bool = False
    last: bool = False
    dual: bool = False
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, streams: dict[str, Array], c: ModulationInput) -> dict[str, Array]:
        """streams: `image` [b n d], `text` [b l d] and the key mask `mask` [b n+l], or None."""
        n, d = streams["image"].shape[1:]
        c, rotary = c if isinstance(c, tuple) else (c, None)
        for_image = transformer.Modulation(9 if self.dual else 6, d, name="image_modulation")(c)
        for_text = transformer.Modulation(2 if self.last else 6, d, name="text_modulation")(c)
        heads = [self._project("image", streams["image"], for_image), self._project("text", streams["text"], for_text)]
        q, k, v = (jnp.concatenate(pair, axis=1) for pair in zip(*heads, strict=True))
        if rotary is not None:
            q, k = (embeddings.rotate(x, rotary) for x in (q, k))
        mask = None if streams["mask"] is None else streams["mask"][:, None, None]
        taps.tap(self, "joint/map", lambda: taps.attention_map(q, k, mask))
        gathered = attention.attend(q, k, v, mask=mask)
        alone = self._attend_alone(streams["image"], for_image[6:]) if self.dual else None
        image = self._update("image", streams["image"], gathered[:, :n], for_image, alone)
        text = streams["text"]
        if not self.last:
            text = self._update("text", text, gathered[:, n:], for_text)
        return {"image": image, "text": text, "mask": streams["mask"]}

    def _attend_alone(self, x: Array, vectors: list[Array]) -> Array:
        """The gated attention of the image to itself."""
        shift, scale, gate = vectors
        h = transformer.modulate(x, shift, scale, self.dtype)
        q, k, v = self._heads("alone", h)
        h = attention.merge_heads(attention.attend(q, k, v), x.shape[-1], self.dtype, name="alone_out")
        return gate[:, None].astype(self.dtype) * taps.tap(self, "alone/attention", h)

    def _project(self, stream: str, x: Array, vectors: list[Array]) -> list[Array]:
        taps.tap(self, f"{stream}/modulation", lambda: jnp.stack(vectors[:2], axis=1))
        x = taps.tap(self, f"{stream}/norm0", transformer.modulate(x, vectors[0], vectors[1], self.dtype))
        return self._heads(stream, x)

    def _heads(self, stream: str, x: Array) -> list[Array]:
        q, k, v = attention.qkv_heads(x, self.heads, self.dtype, name=f"{stream}_qkv")
        if self.qk_norm:
            taps.tap_heads(self, prefix=f"{stream}/", q_raw=q, k_raw=k)
            q = nn.RMSNorm(dtype=self.dtype, use_fast_variance=False, name=f"{stream}_q_norm")(q)
            k = nn.RMSNorm(dtype=self.dtype, use_fast_variance=False, name=f"{stream}_k_norm")(k)
        for name, heads in zip("qkv", (q, k, v), strict=True):
            taps.tap_heads(self, prefix=f"{stream}/", **{name: heads})
        return [q, k, v]

    def _update(
        self, stream: str, x: Array, gathered: Array, vectors: list[Array], alone: Array | None = None
    ) -> Array:
        _, _, gate_a, shift_m, scale_m, gate_m = vectors[:6]
        h = attention.merge_heads(gathered, x.shape[-1], self.dtype, name=f"{stream}_out")
        h = taps.tap(self, f"{stream}/attention", h)
        x = x + gate_a[:, None].astype(self.dtype) * h
        x = taps.tap(self, f"{stream}/res_self", x if alone is None else x + alone)
        h = taps.tap(self, f"{stream}/norm1", transformer.modulate(x, shift_m, scale_m, self.dtype))
        h = transformer.FeedForward(self.mlp_ratio, self.dtype, name=f"{stream}_mlp")(h)
        return taps.tap(self, f"{stream}/out", x + gate_m[:, None].astype(self.dtype) * h)


class MMDiT(nn.Module):
    """MMDiT, by default XL/2 on 4-channel latents with CLIP-L + bigG text.

    `noise_label` is 1000 t of rectified flow. cond needs `text` [b l text_dim] and, when pooled_dim > 0,
    `pooled` [b pooled_dim]; `text_mask` [b l] hides padding. position_table = S > 0 keeps an S x S table of
    positions as a constant parameter and crops its centre, as the SD3 checkpoints do; 0 computes positions,
    resampled by `grid` and `positions` as in `DiT`.
    pooled_dim = 0 keeps text out of the modulation. num_classes > 0 makes the network class-conditional: cond takes
    `label` instead of text, embedded as `class_tokens` tokens. step_embed = "zero" or "reference" adds cond["step"] to
    the modulation, `control` adds control metadata. The first `dual` blocks have a second attention, of the image.
    """

    channels: int = 4
    patch: int = 2
    depth: int = 28
    dual: int = 0
    width: int = 1152
    heads: int = 16
    mlp_ratio: float = 4.0
    text_dim: int = 2048
    pooled_dim: int = 2048
    num_classes: int = 0
    class_tokens: int = 1
    control: conditioning.Control | None = None
    qk_norm: bool = True
    position_table: int = 0
    grid: int = 0
    positions: str = "interpolate"
    step_embed: str = ""
    dtype: Dtype = jnp.float32
    remat: bool | str = False  # or one of stacks.REMAT
    scan: bool = False
    scalars: tuple[str, ...] = ()  # further scalar conditions, embedded as zero at initialisation, as ("tau",)

    published = Flow()

    @nn.nowrap
    def signals(self) -> dict[str, Signal]:
        """What it is conditioned on."""
        return conditioning.signals(self)

    @nn.compact
    def __call__(
        self, x: Float[Array, "b h w c"], noise_label: ArrayLike, cond: Cond = None, *, deterministic: bool = True
    ) -> Float[Array, "b h w c"]:
        cond = cond or {}
        checks.check_inputs("MMDiT", x, self.channels, self.patch, cond, self.signals())
        if not self.num_classes:
            widths = {"pooled": self.pooled_dim} if self.pooled_dim else {}
            conditioning.check_text("MMDiT", cond, text=self.text_dim, **widths)
        _, height, width, _ = x.shape
        pooled = []
        if self.pooled_dim and not self.num_classes:
            pooled = [embeddings.EmbedMLP(self.width, name="pooled")(jnp.asarray(cond["pooled"], jnp.float32))]
        c = conditioning.embed(self, x, noise_label, cond, self.width, *pooled)
        dense = partial(nn.Dense, self.width, kernel_init=initializers.xavier, dtype=self.dtype)
        if self.num_classes:
            text = conditioning.class_tokens(self, x, cond, self.width)
        else:
            text = dense(name="text")(jnp.asarray(cond["text"]))
        image = dense(name="patches")(transformer.patchify(taps.tap(self, "in", x), self.patch))
        positions = self._positions(height // self.patch, width // self.patch)
        image = taps.tap(self, "embedded", image + positions.reshape(-1, self.width).astype(self.dtype))
        mask = None
        if "text_mask" in cond:
            mask = jnp.concatenate([jnp.ones(image.shape[:2], bool), jnp.asarray(cond["text_mask"], bool)], axis=1)
        fields: dict[str, Any] = {
            "heads": self.heads,
            "mlp_ratio": self.mlp_ratio,
            "qk_norm": self.qk_norm,
            "dtype": self.dtype,
        }
        if not 0 <= self.dual < self.depth:
            raise ValueError(
                f"dual, the number of first blocks with a second attention, must be below depth={self.depth}, got "
                f"{self.dual}"
            )
        how: dict[str, Any] = {"scan": self.scan, "remat": self.remat, **fields}
        streams = {"image": image, "text": text, "mask": mask}
        if self.dual:
            streams = stacks.block_stack(Block, self.dual, name="dual", dual=True, **how)(streams, c)
        if self.depth - 1 > self.dual:
            streams = stacks.block_stack(Block, self.depth - 1 - self.dual, **how)(streams, c)
        last = stacks.rematerialised(Block, self.remat)
        image = last(**fields, last=True, name="last_block")(streams, c)["image"]
        out = transformer.FinalLayer(self.patch**2 * self.channels, name="final")(image, c)
        return taps.tap(self, "out", transformer.unpatchify(out, self.patch, height, width))

    def _positions(self, rows: int, columns: int) -> Array:
        side = self.position_table
        if not side:
            return jnp.asarray(embeddings.sincos_positions(rows, columns, self.width, self.grid, self.positions))
        if rows > side or columns > side:
            raise ValueError(f"{rows}x{columns} patches exceed the {side}x{side} position table; use a smaller image")
        table = self.param("positions", lambda key: embeddings.position_table(side, self.width))
        top, left = (side - rows) // 2, (side - columns) // 2
        return jax.lax.stop_gradient(table)[top : top + rows, left : left + columns]
