"""Activations by module path: how networks expose them, and how one evaluation records them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.traverse_util import flatten_dict
from jaxtyping import Array, Float

from jaxdiff.conditions import Cond
from jaxdiff.models import stacks
from jaxdiff.trees import Params

T = TypeVar("T")
TAP = "tap:"  # keeps tap names distinct from those of submodules


def tap(module: nn.Module, name: str, value: T) -> T:
    """Return `value`, recorded as <module path>/<name> while activations are recorded.

    A callable is evaluated only then, for values the network itself does not compute.
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


def named(sown: Params) -> dict[str, Array]:
    """The activations in a collection of intermediates, by name, in order of execution."""
    paths = {path: value for path, value in flatten_dict(sown).items() if path[-1].startswith(TAP)}
    return {"/".join((*path[:-1], path[-1].removeprefix(TAP))): value for path, value in paths.items()}


def grid_of(shape: tuple[int, ...], image: tuple[int, ...]) -> tuple[int, int] | None:
    """Height and width of an activation; tokens are in row-major order, downsampled equally in both directions."""
    if len(shape) == 4:
        return shape[1:3]
    if len(shape) != 3 or (image[1] * image[2]) % shape[1]:
        return None
    step = math.isqrt(image[1] * image[2] // shape[1])
    height, width = image[1] // step, image[2] // step
    return (height, width) if height * width == shape[1] else None


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


# ------------------------------------------------------------------------------------------ recording


def record(
    apply: nn.Module | Callable[..., Any], params: Params, x: Array, label: Array, cond: Cond = None
) -> tuple[Array, dict[str, Array]]:
    """The output and every tap of one evaluation, by name, in order of execution.

    `apply` is a model or a function called as `model.apply`. Under jit only what is used is computed.
    """
    call = apply.apply if isinstance(apply, nn.Module) else apply
    out, state = call({"params": params}, x, label, cond, mutable=["intermediates"])
    return out, named(state.get("intermediates", {}))


def unrolled(model: nn.Module) -> nn.Module:
    """The model without scan (which computes all), remat (which reorders names) and token masking."""
    plain: dict[str, Any] = {"scan": False, "remat": False, "mask_ratio": ()}
    changes = {field: value for field, value in plain.items() if getattr(model, field, value) != value}
    return model.clone(**changes) if changes else model


def unstacked(model: nn.Module, params: Params) -> Params:
    """Parameters of the model as those of the unrolled one."""
    return stacks.unrolled_params(params) if getattr(model, "scan", False) else params
