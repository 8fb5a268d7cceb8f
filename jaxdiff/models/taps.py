"""Activations exposed to `jaxdiff.features`, by module path."""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float

T = TypeVar("T")
TAP = "tap:"  # keeps tap names distinct from those of submodules


def tap(module: nn.Module, name: str, value: T) -> T:
    """Return `value`, recorded as <module path>/<name> while `jaxdiff.features` is capturing.

    A callable is evaluated only while capturing, for values the network itself does not compute.
    """
    if module.is_mutable_collection("intermediates"):
        sown = value() if callable(value) else value
        module.sow("intermediates", TAP + name, sown, init_fn=lambda: None, reduce_fn=lambda _, new: new)
    return value


def tap_heads(
    module: nn.Module, mask: Array | None = None, prefix: str = "", bias: Array | None = None, **heads: Array
) -> None:
    """Tap q, k, v [b, n, heads, d] as [b, n, heads d], and the attention [b, heads, n, m] of q and k as `map`."""
    for name, value in heads.items():
        tap(module, prefix + name, lambda value=value: value.reshape(*value.shape[:2], -1))
    if "q" in heads and "k" in heads:
        tap(module, f"{prefix}map", lambda: attention_map(heads["q"], heads["k"], mask, bias))


def attention_map(
    q: Float[Array, "b n h d"], k: Float[Array, "b m h d"], mask: Array | None = None, bias: Array | None = None
) -> Float[Array, "b h n m"]:
    """softmax(q k' / sqrt(d) + bias) in float32, which fused attention never materialises.

    `mask` and `bias` broadcast to [b, h, n, m].
    """
    logits = jnp.einsum("bnhd,bmhd->bhnm", q, k, preferred_element_type=jnp.float32) / np.float32(np.sqrt(q.shape[-1]))
    if bias is not None:
        logits = logits + bias.astype(jnp.float32)
    if mask is not None:
        logits = jnp.where(mask, logits, -jnp.inf)
    return jax.nn.softmax(logits)
