"""Text padded with noisy copies of its own tokens (Berrada et al. 2024, arXiv 2411.03177).

With n text tokens y, M slots and s the standard deviation of y per channel:

    slot j holds y_(j mod n), and for j >= n  + scale sqrt(ceil(M/n) - 1) s eps,  eps ~ N(0, I)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxdiff.conditions import Cond
from jaxdiff.errors import choose, concrete

Padding = Callable[[Any, Array], Any]  # (cond or batch, keys [b]) -> the same, padded
PADDINGS = ("zero", "replicate", "noisy")


def pad_text(
    text: Float[Array, "l d"],
    count: ArrayLike,
    total: int,
    kind: str = "noisy",
    scale: float = 0.02,
    key: Array | None = None,
) -> Float[Array, "{total} d"]:
    """The first `count` tokens of a text, padded to `total` with zeros, copies (replicate) or noisy copies of them."""
    choose(kind, PADDINGS, "text padding")
    seen = concrete(count)
    if not total > 0 or (seen is not None and not 1 <= seen <= min(len(text), total)):
        raise ValueError(
            f"cannot pad {count} of {len(text)} text tokens to {total} slots: count must be in "
            f"1..{min(len(text), total)}; truncate the text, or use more slots"
        )
    if kind == "noisy" and key is None:
        raise ValueError("noisy padding needs a random key: pass key=")
    count = jnp.asarray(count).clip(1, min(len(text), total))
    slots = jnp.arange(total)
    copies = text[slots % count]
    if kind == "replicate":
        return copies
    extra = (slots >= count)[:, None]
    if kind == "zero":
        return jnp.where(extra, 0, copies)
    real = (jnp.arange(len(text)) < count)[:, None]
    mean = text.mean(0, where=real)
    std = jnp.sqrt(jnp.square(text - mean).mean(0, where=real))
    repeats = jnp.sqrt(((total - 1) // count).astype(text.dtype))  # ceil(total / count) - 1
    assert key is not None
    noise = scale * repeats * std * jax.random.normal(key, copies.shape, text.dtype)
    return copies + jnp.where(extra, noise, 0)


def padding(kind: str, scale: float = 0.02) -> Padding:
    """(cond, keys [b]) -> cond with `text` padded where `text_mask` is false, and the mask removed."""
    choose(kind, PADDINGS, "text padding")

    def pad(cond: Cond, keys: Array) -> Cond:
        if cond is None or "text" not in cond:
            return cond
        if "text_mask" not in cond:
            raise ValueError("text padding needs cond['text_mask'] [b, l], true for text tokens")
        text, counts = jnp.asarray(cond["text"]), jnp.asarray(cond["text_mask"], jnp.int32).sum(-1)

        def fill(text: Array, count: Array, key: Array) -> Array:
            return pad_text(text, count, len(text), kind, scale, key)

        kept = {name: value for name, value in cond.items() if name != "text_mask"}
        return {**kept, "text": jax.vmap(fill)(text, counts, keys)}

    return pad
