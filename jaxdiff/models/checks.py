"""Checks of a network's fields when it is built, and of its inputs while tracing."""

from __future__ import annotations

import math
from collections.abc import Iterable

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array

from jaxdiff import ranges
from jaxdiff.conditions import Cond
from jaxdiff.errors import nearest

# fields of all networks by name, which mean the same in each
FIELDS = {
    **dict.fromkeys(("channels", "width", "channels_per_head", "uncertainty_channels"), "[1, 2**20] channels"),
    **dict.fromkeys(("noise_channels", "embed_channels", "text_dim", "pooled_dim"), "[0, 2**20] channels"),
    **dict.fromkeys(("depth", "single_depth", "depths", "mid_depth", "decoder", "dual"), "[0, 10000] layers"),
    **dict.fromkeys(("label_balance", "concat_balance", "res_balance", "attn_balance"), "[0, 1]"),
    **dict.fromkeys(("heads", "groups", "class_tokens", "size_width"), "[1, 10000]"),
    **dict.fromkeys(("num_classes", "augment_dim", "null_tokens", "sizes", "head_width"), "[0, 2**24]"),
    **dict.fromkeys(("grid", "position_table", "mask_buckets", "frequencies", "blocks"), "[0, 10000]"),
    "resolution": "[1, 65536] pixels",
    "patch": "[1, 1024] pixels along a side",
    "channel_mult": "[1, 1024] channels of each level, in multiples of width",
    "dropout": "[0, 1) probability",
    "mlp_ratio": "(0, 1024] hidden width of MLPs over their width",
    "fourier_scale": "(0, inf)",
    "guidance": "(-inf, inf)",
}


def check_sizes(model: nn.Module) -> None:
    """Reject fields that no network can have, before Flax does in the middle of a layer."""
    declared = model.__dataclass_fields__
    values = {name: getattr(model, name) for name in declared if name not in ("parent", "name")}
    kinds = {name: declared[name].default for name in FIELDS if name in declared}
    ranges.check_kinds(values, kinds, "model.fields.")
    ranges.check(values, FIELDS, "model.fields.")
    if not values.get("channel_mult", True):
        raise ValueError("model.fields.channel_mult is empty: give one number per resolution, for example (1, 2, 2)")
    if "patch" in values and "heads" in values:
        width, heads = values["width"], values["heads"]
        if width % heads or width % 4:
            step = math.lcm(4, heads)
            near = max(1, round(width / step)) * step
            raise ValueError(
                f"model.fields.width={width} must be divisible by heads={heads} and by 4, for the positions of tokens; "
                f"the nearest that is, is {near}"
            )


def group_count(channels: int) -> int:
    """The groups of a UNet's normalization: 32, or as many as have 4 channels each."""
    groups = min(32, channels // 4)
    if not groups or channels % groups:
        raise ValueError(
            f"a layer of {channels} channels does not split into groups for normalization; make model.fields.width a "
            "multiple of 4, and of 32 where a layer has more than 128 channels"
        )
    return groups


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
