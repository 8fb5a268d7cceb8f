"""Multi-head attention; every kernel has a heads axis, so heads can be sharded."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Dtype
from jaxtyping import Array, Bool, Float

from jaxdiff import placement
from jaxdiff.models import fused_attention, initializers, taps
from jaxdiff.models.initializers import Initializer

MIN_TOKENS = 256  # of queries and of keys, for splash attention
BLOCK = 128  # queries at a time, on CPU
MANY_WEIGHTS = 2**20  # of a head, from which blocks are faster on CPU
FORWARD_MODE = contextvars.ContextVar("forward_mode", default=False)


def attend(
    q: Float[Array, "b n h d"],
    k: Float[Array, "b m h d"],
    v: Float[Array, "b m h d"],
    bias: Float[Array, ...] | None = None,
    mask: Bool[Array, ...] | None = None,
) -> Float[Array, "b n h d"]:
    """softmax(q k' / sqrt(d) + bias) v, by a fused kernel where the target platform has one for these arguments."""
    keys = mask[:, 0, 0] if mask is not None and mask.shape == (len(k), 1, 1, k.shape[1]) else None
    simple = bias is None and (mask is None or keys is not None)
    kernel = fused(placement.platform(), q.dtype, q.shape, k.shape[1], simple)
    q, k, v = placement.along_heads(q, k, v)
    if kernel == "splash":
        return fused_attention.splash(q, k, v, keys)
    if kernel == "cudnn":
        return fused_attention.cudnn(q, k, v, keys)
    if kernel == "blocks":
        return _in_blocks(q, k, v, mask)
    return jax.nn.dot_product_attention(q, k, v, bias, mask, implementation="xla")


def _in_blocks(q: Array, k: Array, v: Array, mask: Array | None) -> Array:
    """The plain form for BLOCK queries at a time, whose weights stay in the cache; gradients compute them again."""

    @jax.checkpoint
    def block(q: Array) -> Array:
        return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation="xla")

    b, n, h, d = q.shape
    parts = q.reshape(b, n // BLOCK, BLOCK, h, d).swapaxes(0, 1)
    return jax.lax.map(block, parts).swapaxes(0, 1).reshape(q.shape)


def fused(platform: str, dtype: Dtype, shape: tuple[int, ...], keys: int, simple: bool) -> str:
    """The kernel for queries [b n h d] and a number of keys: cudnn, splash, blocks (on CPU) or xla, the plain form.

    `simple` means that there is no bias, and no mask but of keys. cuDNN takes half precision and heads of width 8, 16,
    ..., 128. Splash attention, for TPUs, takes each device's own part of the batch and of the heads; below MIN_TOKENS
    queries or keys the weights are too few to matter.
    """
    if not simple:
        return "xla"
    if platform == "cpu" and shape[1] * keys >= MANY_WEIGHTS and shape[1] % BLOCK == 0:
        return "blocks"
    if FORWARD_MODE.get():
        return "xla"
    half, width = dtype in (jnp.bfloat16, jnp.float16), shape[-1]
    if platform == "cuda" and half and width % 8 == 0 and width <= 128:
        return "cudnn"
    long = min(shape[1], keys) >= MIN_TOKENS
    if platform == "tpu" and dtype in (jnp.bfloat16, jnp.float32) and long and placement.divides(shape):
        return "splash"
    return "xla"


@contextlib.contextmanager
def forward_mode() -> Iterator[None]:
    """Use the plain form inside, which `jax.jvp` can differentiate; no fused kernel has forward mode.

    For use around the `jax.jvp` of a function being traced: programs that are already traced do not change.
    """
    token = FORWARD_MODE.set(True)
    try:
        yield
    finally:
        FORWARD_MODE.reset(token)


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
