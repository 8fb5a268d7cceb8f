"""FLUX.1 (Black Forest Labs 2024): two streams with joint attention, then one stream of both, with rotary positions.

c = E_t(t) + E_p(pooled text) [+ E_g(guidance)]
image tokens = packed latents (2x2 patches) W;  text tokens = text W
positions    (0, row, column) of an image token, (0, 0, 0) of text: queries and keys are rotated by them
double block MMDiT's block with RMS-normalised, rotated queries and keys
single block h = LN(x) (1 + scale) + shift over image and text tokens;  x += gate ([Attn(h), gelu(h W_in)] W_out)
out          the final layer of DiT on the image tokens: eps - x0

Guidance distillation: FLUX.1-dev is conditioned on the guidance scale it imitates, FLUX.1-schnell is not.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.typing import Dtype
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxdiff.conditions import METHOD, Cond, Signal
from jaxdiff.conventions import Flow
from jaxdiff.models import attention, checks, conditioning, embeddings, initializers, mmdit, stacks, taps, transformer

SIZES = {
    "dev": {},
    "schnell": {"guidance_embed": False},
}


class SingleBlock(nn.Module):
    """Attention and MLP side by side, over image and text tokens with the same weights."""

    heads: int
    mlp_ratio: float = 4.0
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, streams: dict[str, Array], c: tuple[Array, mmdit.Rotary]) -> dict[str, Array]:
        """streams: as those of `mmdit.Block`."""
        vector, rotary = c
        n, d = streams["image"].shape[1:]
        x = jnp.concatenate([streams["image"], streams["text"]], axis=1)
        shift, scale, gate = transformer.Modulation(3, d, name="modulation")(vector)
        taps.tap(self, "image/modulation", lambda: jnp.stack([shift, scale], axis=1))
        h = transformer.modulate(x, shift, scale, self.dtype)
        taps.tap(self, "image/norm0", lambda: h[:, :n])
        q, k, v = attention.qkv_heads(h, self.heads, self.dtype)
        taps.tap_heads(self, prefix="image/", q_raw=q[:, :n], k_raw=k[:, :n])
        q = nn.RMSNorm(dtype=self.dtype, use_fast_variance=False, name="q_norm")(q)
        k = nn.RMSNorm(dtype=self.dtype, use_fast_variance=False, name="k_norm")(k)
        for stream, part in (("image", slice(0, n)), ("text", slice(n, None))):
            for name, heads in zip("qkv", (q, k, v), strict=True):
                taps.tap_heads(self, prefix=f"{stream}/", **{name: heads[:, part]})
        q, k = (embeddings.rotate(heads, rotary) for heads in (q, k))
        mask = None if streams["mask"] is None else streams["mask"][:, None, None]
        taps.tap(self, "joint/map", lambda: taps.attention_map(q, k, mask))
        gathered = attention.attend(q, k, v, mask=mask).reshape(x.shape)
        taps.tap(self, "image/attention", lambda: gathered[:, :n])
        dense = partial(nn.Dense, kernel_init=initializers.xavier, dtype=self.dtype)
        inner = nn.gelu(dense(int(self.mlp_ratio * d), name="mlp_in")(h))
        taps.tap(self, "image_mlp/inner", lambda: inner[:, :n])
        x = x + gate[:, None].astype(self.dtype) * dense(d, name="merge")(jnp.concatenate([gathered, inner], axis=-1))
        image = taps.tap(self, "image/out", x[:, :n])
        return {"image": image, "text": taps.tap(self, "text/out", x[:, n:]), "mask": streams["mask"]}


class Flux(nn.Module):
    """FLUX.1, by default dev: 11.9 B parameters on 16-channel latents with T5-XXL text and CLIP-L's pooled text.

    `noise_label` is 1000 t of rectified flow. cond needs `text` [b l text_dim] and `pooled` [b pooled_dim]; `text_mask`
    [b l] hides padding, which the published networks were trained to see. With guidance_embed, cond["guidance"] [b] is
    the scale of guidance to imitate, by default `guidance`. `axes` are the channels of a head that each position
    rotates. step_embed = "zero" or "reference" adds cond["step"] to the modulation.
    """

    channels: int = 16
    patch: int = 2
    depth: int = 19  # double blocks
    single_depth: int = 38
    width: int = 3072
    heads: int = 24
    mlp_ratio: float = 4.0
    text_dim: int = 4096
    pooled_dim: int = 768
    guidance_embed: bool = True
    guidance: float = 3.5
    axes: tuple[int, ...] = (16, 56, 56)
    control: conditioning.Control | None = None
    step_embed: str = ""
    dtype: Dtype = jnp.float32
    remat: bool | str = False  # or one of stacks.REMAT
    scan: bool = False
    scalars: tuple[str, ...] = ()  # further scalar conditions, embedded as zero at initialisation, as ("tau",)

    published = Flow()

    @nn.nowrap
    def signals(self) -> dict[str, Signal]:
        """What it is conditioned on."""
        found = conditioning.signals(self)
        if self.guidance_embed:
            found["guidance"] = Signal((), group=METHOD, required=False)
        return found

    @nn.compact
    def __call__(
        self, x: Float[Array, "b h w c"], noise_label: ArrayLike, cond: Cond = None, *, deterministic: bool = True
    ) -> Float[Array, "b h w c"]:
        cond = cond or {}
        checks.check_inputs("Flux", x, self.channels, self.patch, cond, self.signals())
        conditioning.check_text("Flux", cond, text=self.text_dim, pooled=self.pooled_dim)
        self._check_axes()
        _, height, width, _ = x.shape
        vectors = [embeddings.EmbedMLP(self.width, name="pooled")(jnp.asarray(cond["pooled"], jnp.float32))]
        if self.guidance_embed:
            scale = embeddings.noise_labels(cond.get("guidance", self.guidance), x)
            vectors.append(embeddings.EmbedMLP(self.width, name="guide")(embeddings.sinusoid(1000 * scale, 256)))
        c = conditioning.embed(self, x, noise_label, cond, self.width, *vectors)
        dense = partial(nn.Dense, self.width, kernel_init=initializers.xavier, dtype=self.dtype)
        text = dense(name="text")(jnp.asarray(cond["text"]))
        image = dense(name="patches")(transformer.patchify(taps.tap(self, "in", x), self.patch))
        image = taps.tap(self, "embedded", image)
        mask = None
        if "text_mask" in cond:
            mask = jnp.concatenate([jnp.ones(image.shape[:2], bool), jnp.asarray(cond["text_mask"], bool)], axis=1)
        positions = token_positions(height // self.patch, width // self.patch, text.shape[1], len(self.axes))
        modulation = (c, embeddings.rotary_angles(positions, self.axes))
        how: dict[str, Any] = {"scan": self.scan, "remat": self.remat, "heads": self.heads}
        how |= {"mlp_ratio": self.mlp_ratio, "dtype": self.dtype}
        streams = {"image": image, "text": text, "mask": mask}
        streams = stacks.block_stack(mmdit.Block, self.depth, qk_norm=True, **how)(streams, modulation)
        streams = stacks.block_stack(SingleBlock, self.single_depth, name="single", **how)(streams, modulation)
        out = transformer.FinalLayer(self.patch**2 * self.channels, name="final")(streams["image"], c)
        return taps.tap(self, "out", transformer.unpatchify(out, self.patch, height, width))

    @nn.nowrap
    def _check_axes(self) -> None:
        head = self.width // self.heads
        if len(self.axes) != 3 or sum(self.axes) != head or any(width % 2 for width in self.axes):
            raise ValueError(
                "axes, the channels that each of three positions rotates, must be even and sum to the width of a head, "
                f"{self.width} / {self.heads} = {head}; got {self.axes}"
            )


def token_positions(rows: int, columns: int, texts: int, axes: int = 3) -> np.ndarray:
    """[n + l, axes]: (0, row, column) of image tokens in row-major order, then zeros for text tokens."""
    found = np.zeros((rows * columns + texts, axes), int)
    found[: rows * columns, -2:] = np.indices((rows, columns)).reshape(2, -1).T
    return found
