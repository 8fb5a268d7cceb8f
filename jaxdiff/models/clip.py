"""CLIP (Radford et al. 2021): the text encoders of Stable Diffusion 1 to 3, and the image encoder of CLIP scores.

    block    x += attention(norm0(x));  x += out(act(in(norm1(x))))
    text     token + position embeddings, causal blocks, norm; pooled: the end-of-text token [times W]
    image    class token, patches W; + positions, norm, blocks; pooled: norm(class token) W

`SIZES` holds published text encoders.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Dtype
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from jaxdiff.errors import choose
from jaxdiff.models import attention, transformer
from jaxdiff.models.resize import as_rgb, resize

SIZES: dict[str, dict[str, Any]] = {
    "l": {},  # SD 1; SDXL uses its penultimate block, SD3 that plus a projection to 768
    "bigg": {
        "width": 1280, "depth": 32, "heads": 20, "mlp_width": 5120, "activation": "gelu", "projection": 1280,
        "penultimate": True,
    },  # SDXL and SD3
}  # fmt: skip
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "quick_gelu": lambda x: x * nn.sigmoid(1.702 * x),  # OpenAI's
    "gelu": lambda x: nn.gelu(x, approximate=False),  # OpenCLIP's
}
normal = nn.initializers.normal(0.02)


def norm(dtype: Dtype, name: str) -> nn.LayerNorm:
    return nn.LayerNorm(epsilon=1e-5, dtype=dtype, use_fast_variance=False, name=name)


class Attention(nn.Module):
    """Multi-head attention, causal or full."""

    heads: int
    causal: bool
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "b n d"], mask: Bool[Array, "b n"] | None) -> Float[Array, "b n d"]:
        q, k, v = attention.qkv_heads(x, self.heads, self.dtype)
        hidden = None if mask is None else mask[:, None, None]
        gathered = jax.nn.dot_product_attention(q, k, v, mask=hidden, is_causal=self.causal)
        return attention.merge_heads(gathered, x.shape[-1], self.dtype)


class MLP(nn.Module):
    """Dense, activation, Dense back."""

    width: int
    activation: str
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        h = nn.Dense(self.width, dtype=self.dtype, name="in")(x)
        return nn.Dense(x.shape[-1], dtype=self.dtype, name="out")(ACTIVATIONS[self.activation](h))


class Block(nn.Module):
    """Pre-norm attention and MLP with residual connections."""

    heads: int
    mlp_width: int
    activation: str
    causal: bool
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "b n d"], mask: Bool[Array, "b n"] | None = None) -> Float[Array, "b n d"]:
        attention = Attention(self.heads, self.causal, self.dtype, name="attention")
        x = x + attention(norm(self.dtype, "norm0")(x), mask)
        return x + MLP(self.mlp_width, self.activation, self.dtype, name="mlp")(norm(self.dtype, "norm1")(x))


class CLIPText(nn.Module):
    """Token ids [b l] to {"text": [b l width], "pooled": [b width or projection]}, ready to be used as conditioning.

    `text` is the normalised output of the last block; with `penultimate`, the unnormalised output of the one before, as
    in SDXL and SD3. `pooled` is always taken from the last block, at the first `eos` token (at the start token if
    there is none). Public pipelines attend to padding; `mask` [b l] hides it.
    """

    vocabulary: int = 49408
    length: int = 77
    width: int = 768
    depth: int = 12
    heads: int = 12
    mlp_width: int = 3072
    activation: str = "quick_gelu"
    projection: int = 0  # width `pooled` is projected to; 0: no projection
    eos: int = 49407
    penultimate: bool = False
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, ids: Int[Array, "b l"], mask: ArrayLike | None = None) -> dict[str, Float[Array, ...]]:
        check(self)
        check_ids("CLIPText", ids, mask, self.length)
        positions = self.param("positions", normal, (self.length, self.width))
        x = nn.Embed(self.vocabulary, self.width, dtype=self.dtype, embedding_init=normal, name="tokens")(ids)
        x = x + positions[: ids.shape[1]].astype(self.dtype)
        mask = None if mask is None else jnp.asarray(mask, bool)
        before = x
        for i in range(self.depth):
            before = x
            x = Block(self.heads, self.mlp_width, self.activation, True, self.dtype, name=f"blocks_{i}")(x, mask)
        x = norm(jnp.float32, "out_norm")(x)
        pooled = x[jnp.arange(len(ids)), (ids == self.eos).argmax(axis=1)]
        if self.projection:
            pooled = nn.Dense(self.projection, use_bias=False, name="projection")(pooled)
        return {"text": before.astype(jnp.float32) if self.penultimate else x, "pooled": pooled}


MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # for RGB in [0, 1]


def preprocess(images: ArrayLike, side: int = 224, kind: str = "clean") -> Float[Array, "b {side} {side} 3"]:
    """uint8 or [-1, 1] images, stretched to a square, resized by `kind` and normalised as in CLIP's training."""
    unit = (resize(as_rgb(images), side, kind).clip(-1, 1) + 1) / 2
    return (unit - jnp.asarray(MEAN)) / jnp.asarray(STD)


class CLIPVision(nn.Module):
    """Preprocessed images to embeddings [b projection]."""

    side: int = 224
    patch: int = 14
    width: int = 1024
    depth: int = 24
    heads: int = 16
    mlp_width: int = 4096
    activation: str = "quick_gelu"
    projection: int = 768
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "b h w 3"]) -> Float[Array, "b e"]:
        check(self)
        if x.shape[1:] != (self.side, self.side, 3):
            raise ValueError(
                f"CLIPVision takes images [b, {self.side}, {self.side}, 3], got {x.shape}; use models.clip.preprocess"
            )
        x = nn.Dense(self.width, use_bias=False, dtype=self.dtype, name="patches")(transformer.patchify(x, self.patch))
        start = self.param("class_token", normal, (self.width,)).astype(self.dtype)
        x = jnp.concatenate([jnp.broadcast_to(start, (len(x), 1, self.width)), x], axis=1)
        positions = self.param("positions", normal, ((self.side // self.patch) ** 2 + 1, self.width))
        x = norm(self.dtype, "in_norm")(x + positions.astype(self.dtype))
        for i in range(self.depth):
            x = Block(self.heads, self.mlp_width, self.activation, False, self.dtype, name=f"blocks_{i}")(x)
        pooled = norm(jnp.float32, "out_norm")(x[:, 0])
        return nn.Dense(self.projection, use_bias=False, name="projection")(pooled)


def check(model: CLIPText | CLIPVision) -> None:
    """Reject an unknown activation, and a number of heads that does not divide the width."""
    choose(model.activation, ACTIVATIONS, "activation of CLIP")
    if model.width % model.heads:
        raise ValueError(f"width={model.width} is not divisible by heads={model.heads}; set heads to a divisor")


def check_ids(model: str, ids: Array, mask: ArrayLike | None, length: int | None = None) -> None:
    """Reject token ids and masks of the wrong shape, while tracing."""
    if ids.ndim != 2:
        raise ValueError(f"{model} takes token ids of shape [b, l], got {ids.shape}")
    if length is not None and ids.shape[1] > length:
        raise ValueError(
            f"{model} has positions for {length} tokens, got {ids.shape[1]}; "
            f"truncate with data.tokenizer(..., length={length})"
        )
    if mask is not None and jnp.shape(mask) != ids.shape:
        raise ValueError(f"{model} takes a mask of the same shape as its ids, {ids.shape}, got {jnp.shape(mask)}")
