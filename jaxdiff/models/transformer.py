"""Building blocks of transformers: patches, modulated norms, the feed-forward layer, the final layer.

Modulation and norm statistics stay in float32; only the large matrix products run in `dtype`.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import linen as nn
from flax.typing import Dtype
from jaxtyping import Array, Float

from jaxdiff.models import initializers, taps


def patchify(x: Float[Array, "b h w c"], patch: int) -> Float[Array, "b n d"]:
    """Tokens in row-major order, each a patch flattened as (row, column, channel)."""
    return rearrange(x, "b (h p) (w q) c -> b (h w) (p q c)", p=patch, q=patch)


def unpatchify(tokens: Float[Array, "b n d"], patch: int, height: int, width: int) -> Float[Array, "b h w c"]:
    """The inverse of `patchify` for an image of height x width pixels."""
    return rearrange(
        tokens, "b (h w) (p q c) -> b (h p) (w q) c", p=patch, q=patch, h=height // patch, w=width // patch
    )


def normalize(x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
    """LayerNorm without scale or bias, eps 1e-6, in float32."""
    x = x.astype(jnp.float32)
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-6)


def modulate(
    x: Float[Array, "b n d"], shift: Float[Array, "b d"], scale: Float[Array, "b d"], dtype: Dtype
) -> Float[Array, "b n d"]:
    """normalize(x) (1 + scale) + shift, computed in float32, returned in dtype."""
    return (normalize(x) * (1 + scale[:, None]) + shift[:, None]).astype(dtype)


class Modulation(nn.Module):
    """SiLU then a Dense, zero-initialised (adaLN-zero), split into `parts` vectors, in float32."""

    parts: int
    features: int
    kernel_init: initializers.Initializer = initializers.zeros

    @nn.compact
    def __call__(self, c: Float[Array, "b d"]) -> list[Float[Array, "b e"]]:
        out = nn.Dense(self.parts * self.features, kernel_init=self.kernel_init, name="dense")(nn.silu(c))
        return jnp.split(out, self.parts, axis=-1)


class FeedForward(nn.Module):
    """Dense to ratio * d, tanh-GELU, Dense back."""

    ratio: float = 4.0
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        d = x.shape[-1]
        dense = partial(nn.Dense, kernel_init=initializers.xavier, dtype=self.dtype)
        x = taps.tap(self, "inner", nn.gelu(dense(int(self.ratio * d), name="in")(x)))
        return taps.tap(self, "out", dense(d, name="out")(x))


class FinalLayer(nn.Module):
    """Modulated norm, then a zero-initialised Dense to patches, in float32."""

    features: int

    @nn.compact
    def __call__(self, x: Float[Array, "b n d"], c: Float[Array, "b e"]) -> Float[Array, "b n f"]:
        shift, scale = Modulation(2, x.shape[-1], name="modulation")(c)
        x = modulate(x, shift, scale, jnp.float32)
        return nn.Dense(self.features, kernel_init=initializers.zeros, name="out")(x)
