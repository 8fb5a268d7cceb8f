"""The encoder of T5 version 1.1 (Raffel et al. 2020), the text encoder of SD3, PixArt and Imagen.

    block   x += attention(norm0(x)), logits q k + r[bucket(j - i)] without the usual 1 / sqrt(d)
            x += (gelu(norm1(x) W) * norm1(x) V) U
    norm    x / sqrt(mean x^2 + 1e-6) * scale: no centring, and no layer has a bias

`bucket` groups distances between tokens, separately per direction: small ones exactly, larger ones logarithmically, all
beyond `distance` together. The table r is shared by all blocks.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.typing import Dtype
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from jaxdiff.models.attention import merge_heads
from jaxdiff.models.clip import check_ids


def buckets_of(offset: Int[np.ndarray, ...], buckets: int, distance: int) -> Int[np.ndarray, ...]:
    """The bucket of key position minus query position."""
    half, far = buckets // 2, np.abs(offset)
    exact = half // 2
    # float32, as in the public implementations: bucket boundaries are sensitive to rounding
    ratio = np.log(np.maximum(far, exact).astype(np.float32) / np.float32(exact)) / np.float32(np.log(distance / exact))
    coarse = np.minimum(exact + (ratio * np.float32(half - exact)).astype(np.int64), half - 1)
    return np.where(far < exact, far, coarse) + half * (offset > 0)


def norm(dtype: Dtype, name: str) -> nn.RMSNorm:
    return nn.RMSNorm(epsilon=1e-6, dtype=dtype, use_fast_variance=False, name=name)


class Attention(nn.Module):
    """Self-attention with a relative position bias."""

    heads: int
    head_width: int
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(
        self, x: Float[Array, "b l d"], bias: Float[Array, "1 heads l l"], mask: Bool[Array, "b l"] | None
    ) -> Float[Array, "b l d"]:
        features = (3, self.heads, self.head_width)
        qkv = nn.DenseGeneral(features, use_bias=False, dtype=self.dtype, name="qkv")(x)
        hidden = None if mask is None else mask[:, None, None]
        q, k, v = (qkv[:, :, i] for i in range(3))
        gathered = jax.nn.dot_product_attention(q, k, v, bias.astype(self.dtype), hidden, scale=1.0)
        return merge_heads(gathered, x.shape[-1], self.dtype, use_bias=False)


class GatedMLP(nn.Module):
    """GEGLU: the tanh-GELU of gates times values, both from one kernel [d, 2, width], then Dense back."""

    width: int
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "b l d"]) -> Float[Array, "b l d"]:
        h = nn.DenseGeneral((2, self.width), use_bias=False, dtype=self.dtype, name="in")(x)
        return nn.Dense(x.shape[-1], use_bias=False, dtype=self.dtype, name="out")(nn.gelu(h[:, :, 0]) * h[:, :, 1])


class Block(nn.Module):
    """Pre-norm attention and gated MLP with residual connections."""

    heads: int
    head_width: int
    mlp_width: int
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(
        self, x: Float[Array, "b l d"], bias: Float[Array, "1 heads l l"], mask: Bool[Array, "b l"] | None
    ) -> Float[Array, "b l d"]:
        attention = Attention(self.heads, self.head_width, self.dtype, name="attention")
        x = x + attention(norm(self.dtype, "norm0")(x), bias, mask)
        return x + GatedMLP(self.mlp_width, self.dtype, name="mlp")(norm(self.dtype, "norm1")(x))


class T5Encoder(nn.Module):
    """Token ids [b l] to {"text": [b l width]}; `mask` [b l] hides padding. The defaults are version 1.1 XXL."""

    vocabulary: int = 32128
    width: int = 4096
    depth: int = 24
    heads: int = 64
    head_width: int = 64
    mlp_width: int = 10240
    buckets: int = 32
    distance: int = 128
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, ids: Int[Array, "b l"], mask: ArrayLike | None = None) -> dict[str, Float[Array, ...]]:
        check_ids("T5Encoder", ids, mask)
        table = self.param("distances", nn.initializers.normal(0.02), (self.buckets, self.heads))
        place = np.arange(ids.shape[1])
        bias = table[buckets_of(place[None] - place[:, None], self.buckets, self.distance)].transpose(2, 0, 1)[None]
        mask = None if mask is None else jnp.asarray(mask, bool)
        x = nn.Embed(self.vocabulary, self.width, dtype=self.dtype, name="tokens")(ids)
        for i in range(self.depth):
            x = Block(self.heads, self.head_width, self.mlp_width, self.dtype, name=f"blocks_{i}")(x, bias, mask)
        return {"text": norm(jnp.float32, "out_norm")(x)}
