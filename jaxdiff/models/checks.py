"""Checks of a network's inputs, run while tracing."""

from __future__ import annotations

from collections.abc import Iterable

import jax.numpy as jnp
from jaxtyping import Array

from jaxdiff.conditions import Cond
from jaxdiff.errors import nearest


def check_inputs(model: str, x: Array, channels: int, multiple: int, cond: Cond, keys: Iterable[str]) -> None:
    """Reject shapes and conditioning keys that a network does not take."""
    if x.ndim != 4 or x.shape[-1] != channels:
        raise ValueError(
            f"{model} with channels={channels} takes x of shape [b, h, w, {channels}] (NHWC), got {x.shape}"
        )
    if x.shape[1] % multiple or x.shape[2] % multiple:
        raise ValueError(
            f"{model} needs height and width divisible by {multiple}, got {x.shape[1]}x{x.shape[2]}; pad or resize "
            "the input"
        )
    check_keys(model, cond, keys)
    check_text_mask(cond)


def check_text_mask(cond: Cond) -> None:
    """A text mask has one value per token: true for text, false for padding."""
    if cond is None or "text" not in cond or "text_mask" not in cond:
        return
    text, mask = jnp.shape(cond["text"]), jnp.shape(cond["text_mask"])
    if len(text) == 3 and mask != text[:2]:
        raise ValueError(
            f"cond['text_mask'] must be [b, l] = {text[:2]}, one value per text token, got {mask}; "
            "pad or truncate one of them"
        )


def check_keys(model: str, cond: Cond, keys: Iterable[str]) -> None:
    """Reject conditioning that the network does not use."""
    keys = list(keys)
    for key in cond or {}:
        if key not in keys:
            allowed = f"it takes {', '.join(keys)}" if keys else "it is unconditional"
            raise ValueError(f"{model} is not conditioned on {key!r}{nearest(key, keys)}; {allowed}")
