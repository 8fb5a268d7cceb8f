"""Multi-head attention; every kernel has a heads axis, so heads can be sharded."""

from __future__ import annotations

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Dtype
from jaxtyping import Array, Bool, Float

from jaxdiff.models import initializers, taps
from jaxdiff.models.initializers import Initializer


def attend(
    q: Float[Array, "b n h d"],
    k: Float[Array, "b m h d"],
    v: Float[Array, "b m h d"],
    bias: Float[Array, ...] | None = None,
    mask: Bool[Array, ...] | None = None,
) -> Float[Array, "b n h d"]:
    """softmax(q k' / sqrt(d) + bias) v, using the platform's fused kernel where it supports these arguments."""
    plain = bias is None and mask is None
    kernel = fused(_platform(), q.dtype, q.shape[-1], plain)
    return jax.nn.dot_product_attention(q, k, v, bias, mask, implementation=kernel)


def fused(platform: str, dtype: Dtype, width: int, plain: bool) -> Literal["cudnn", "xla"]:
    """The implementation to use: cuDNN needs half precision, heads of width 8, 16, ..., 128, and no mask or bias."""
    half = dtype in (jnp.bfloat16, jnp.float16)
    if platform == "cuda" and half and width % 8 == 0 and width <= 128 and plain:
        return "cudnn"
    return "xla"


def _platform() -> str:
    """The default platform, "cuda" distinguished from other GPUs."""
    backend = jax.default_backend()
    if backend == "gpu" and "cuda" in jax.devices()[0].client.platform_version:
        return "cuda"
    return backend


def qkv_heads(
    x: Array,
    heads: int,
    dtype: Dtype,
    kernel_init: Initializer = initializers.xavier,
    bias_init: Initializer = initializers.zeros,
    use_bias: bool = True,
    name: str = "qkv",
) -> list[Array]:
    """Queries, keys, values [b, n, heads, d/heads] from one kernel [d, 3, heads, d/heads], which shards over heads."""
    features = (3, heads, x.shape[-1] // heads)
    dense = partial(nn.DenseGeneral, kernel_init=kernel_init, bias_init=bias_init, use_bias=use_bias, dtype=dtype)
    qkv = dense(features, name=name)(x)
    return [qkv[:, :, i] for i in range(3)]


def merge_heads(
    x: Array,
    features: int,
    dtype: Dtype,
    kernel_init: Initializer = initializers.xavier,
    bias_init: Initializer = initializers.zeros,
    use_bias: bool = True,
    name: str = "out",
) -> Array:
    """The output projection of attention, kernel [heads, d/heads, features]."""
    dense = partial(nn.DenseGeneral, kernel_init=kernel_init, bias_init=bias_init, use_bias=use_bias, dtype=dtype)
    return dense(features, axis=(-2, -1), name=name)(x)


class SelfAttention(nn.Module):
    """Multi-head self-attention; a bias is added to the logits, a mask hides keys."""

    heads: int
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "b n d"],
        bias: Float[Array, "#b {self.heads} n n"] | None = None,
        mask: Bool[Array, "b n"] | None = None,
    ) -> Float[Array, "b n d"]:
        q, k, v = qkv_heads(x, self.heads, self.dtype)
        mask = None if mask is None else mask[:, None, None]
        taps.tap_heads(self, mask, bias=bias, q=q, k=k, v=v)
        gathered = attend(q, k, v, bias, mask)
        return taps.tap(self, "out", merge_heads(gathered, x.shape[-1], self.dtype))


class CrossAttention(nn.Module):
    """Attention from image tokens to text tokens; the mask hides padding."""

    heads: int
    use_bias: bool = True  # of queries, keys and values
    kernel_init: Initializer = initializers.xavier
    out_init: Initializer = initializers.zeros
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(
        self, x: Float[Array, "b n c"], text: Float[Array, "b l d"], mask: Bool[Array, "b l"] | None
    ) -> Float[Array, "b n c"]:
        c = x.shape[-1]
        dense = partial(nn.DenseGeneral, use_bias=self.use_bias, kernel_init=self.kernel_init, dtype=self.dtype)
        q = dense((self.heads, c // self.heads), name="q")(x)
        kv = dense((2, self.heads, c // self.heads), name="kv")(text)
        mask = None if mask is None else mask[:, None, None]
        taps.tap_heads(self, mask, q=q, k=kv[:, :, 0], v=kv[:, :, 1])
        gathered = attend(q, kv[:, :, 0], kv[:, :, 1], mask=mask)
        return taps.tap(self, "out", merge_heads(gathered, c, self.dtype, self.out_init))
