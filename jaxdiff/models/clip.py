"""CLIP (Radford et al. 2021): the text encoders of Stable Diffusion 1 to 3, and the image encoder that scores need.

    block    x += attention(norm0(x));  x += out(act(in(norm1(x))))
    text     token + position embeddings, causal blocks, norm; pooled: the token at the end of the text [times W]
    image    patches W + positions after one class token, norm, blocks; pooled: norm(class token) W

`SIZES` holds published text encoders.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from jaxdiff.errors import pick
from jaxdiff.models import layers
from jaxdiff.models.layers import Dtype

SIZES: dict[str, dict[str, Any]] = {
    "l": {},  # of SD 1; SDXL reads its penultimate block, SD3 that and a projection to 768
    "bigg": {
        "width": 1280, "depth": 32, "heads": 20, "mlp_width": 5120, "activation": "gelu", "projection": 1280,
        "penultimate": True,
    },  # of SDXL and SD3
}  # fmt: skip
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "quick_gelu": lambda x: x * nn.sigmoid(1.702 * x),  # OpenAI's
    "gelu": lambda x: nn.gelu(x, approximate=False),  # OpenCLIP's
}
normal = nn.initializers.normal(0.02)


def norm(dtype: Dtype, name: str) -> nn.LayerNorm:
    return nn.LayerNorm(epsilon=1e-5, dtype=dtype, use_fast_variance=False, name=name)


class Attention(nn.Module):
    """Multi-head attention to earlier tokens, or to all."""

    heads: int
    causal: bool
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "b n d"], mask: Bool[Array, "b n"] | None) -> Float[Array, "b n d"]:
        q, k, v = layers.qkv_heads(x, self.heads, self.dtype)
        hidden = None if mask is None else mask[:, None, None]
        gathered = jax.nn.dot_product_attention(q, k, v, mask=hidden, is_causal=self.causal)
        return layers.merge_heads(gathered, x.shape[-1], self.dtype)


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
    """Attention and MLP, each after a norm and added."""

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
    """Token ids [b l] to {"text": [b l width], "pooled": [b width or projection]}, ready to be conditions.

    `text` is the normed output of the last block; with `penultimate` that of the block before, not normed, as SDXL and
    SD3 want it. `pooled` always belongs to the last block, at the first token `eos` (that of the start where there is
    none). Public pipelines let padding be attended to; `mask` [b l] hides it.
    """

    vocabulary: int = 49408
    length: int = 77
    width: int = 768
    depth: int = 12
    heads: int = 12
    mlp_width: int = 3072
    activation: str = "quick_gelu"
    projection: int = 0  # width of what `pooled` is projected to; 0: it is not
    eos: int = 49407
    penultimate: bool = False
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, ids: Int[Array, "b l"], mask: Any = None) -> dict[str, Float[Array, ...]]:
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


class CLIPVision(nn.Module):
    """Images as `evaluation.clip.preprocess` gives them to one vector each [b projection]."""

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
                f"CLIPVision takes images [b, {self.side}, {self.side}, 3], got {x.shape}; evaluation.clip.preprocess "
                "makes them"
            )
        x = nn.Dense(self.width, use_bias=False, dtype=self.dtype, name="patches")(layers.patchify(x, self.patch))
        start = self.param("class_token", normal, (self.width,)).astype(self.dtype)
        x = jnp.concatenate([jnp.broadcast_to(start, (len(x), 1, self.width)), x], axis=1)
        positions = self.param("positions", normal, ((self.side // self.patch) ** 2 + 1, self.width))
        x = norm(self.dtype, "in_norm")(x + positions.astype(self.dtype))
        for i in range(self.depth):
            x = Block(self.heads, self.mlp_width, self.activation, False, self.dtype, name=f"blocks_{i}")(x)
        pooled = norm(jnp.float32, "out_norm")(x[:, 0])
        return nn.Dense(self.projection, use_bias=False, name="projection")(pooled)


def check(model: CLIPText | CLIPVision) -> None:
    """Heads divide the width, and the activation is known."""
    pick(ACTIVATIONS, model.activation, "activation of CLIP")
    if model.width % model.heads:
        raise ValueError(f"width={model.width} does not divide into heads={model.heads}; set heads to a divisor")


def check_ids(model: str, ids: Array, mask: Any, length: int | None = None) -> None:
    """Token ids and mask a text encoder can take, checked while tracing."""
    if ids.ndim != 2:
        raise ValueError(f"{model} takes token ids of shape [b, l], got {ids.shape}")
    if length is not None and ids.shape[1] > length:
        raise ValueError(
            f"{model} has positions for {length} tokens, got texts of {ids.shape[1]}; "
            f"cut them, data.tokenizer(..., length={length})"
        )
    if mask is not None and jnp.shape(mask) != ids.shape:
        raise ValueError(f"{model} takes a mask of the shape of its ids, {ids.shape}, got {jnp.shape(mask)}")
