"""Initialises a run from another run or public weights: at a new resolution, with other conditioning.

    same name and shape          copied
    positions of another grid    resampled (MDT): token i of S is placed at i S0 / S of the old grid of S0, with linear
                                 interpolation; offset biases likewise, constant beyond the last
    conditioning layers          reinitialised if they differ: classes to text, another text encoder, control added
    anything else                rejected: it belongs to another network

Computed positions (DiT, PixArt, MMDiT) are not parameters: model.fields.grid and .positions resample them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxdiff.trees import Params, by_name, mismatches, path_name

Arrays: TypeAlias = Mapping[str, Any]  # arrays, or their shapes, by name

# layers through which conditioning enters a network
INPUTS = re.compile(
    r"(^|/)(label|map_label|map_augment|text|text_mlp|null_text|pooled|added|control_embed|scalar_\w+"
    r"|cross_attention/kv)(/|$)"
)


def fit(found: Arrays, params: Params, source: str) -> dict[str, Any]:
    """The arrays of `found` that a network with these `params` (or shapes) can start from, by name."""
    wanted = by_name(params)
    found = resampled(found, wanted)
    fits = {name for name in found if name in wanted and tuple(found[name].shape) == tuple(wanted[name].shape)}
    renewed = {_layer(name) for name in {*found, *wanted} - fits}  # whole layers: never an old bias with a new kernel
    theirs, ours = ({n: a for n, a in arrays.items() if not INPUTS.search(n)} for arrays in (found, wanted))
    wrong = mismatches(theirs, ours)
    if wrong:
        raise ValueError(
            f"{source} belongs to another model: {wrong}; weights of another width, depth or patch size cannot be "
            "reused: set model.fields as in that run's config.json, or unset train.init_from"
        )
    return {name: found[name] for name in wanted if name in fits and _layer(name) not in renewed}


def _layer(name: str) -> str:
    return name.rsplit("/", 1)[0]


def put(kept: Arrays, fresh: Params) -> Params:
    """The parameters `fresh` with the arrays of `kept` substituted."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: jnp.array(kept.get(path_name(path), leaf)), fresh)


def report(kept: Arrays, params: Params) -> str:
    """A summary of what is copied and what is new."""
    new = sorted({_layer(name) for name in by_name(params) if name not in kept})
    rest = f"new: {', '.join(new)}" if new else "nothing is new"
    return f"{len(kept)} arrays copied, {rest}"


# ------------------------------------------------------------------------------------------ position tables


def resampled(found: Arrays, wanted: Arrays) -> dict[str, Any]:
    """`found` with an MDT's position tables resampled to the grid of `wanted`."""
    tables = ("positions", "decoder_positions")
    if not all(name in arrays and arrays[name].ndim == 3 for name in tables for arrays in (found, wanted)):
        return dict(found)
    old, new = (arrays["positions"].shape[:2] for arrays in (found, wanted))
    if old == new:
        return dict(found)
    out = dict(found)
    for name, array in found.items():
        if name in tables:
            out[name] = resample_positions(np.asarray(array), new)
        elif name.endswith("/position_bias"):
            out[name] = resample_bias(np.asarray(array), old, new)
    return out


def resample_positions(table: Float[np.ndarray, "r c d"], grid: tuple[int, int]) -> Float[np.ndarray, "r2 c2 d"]:
    """Learned positions resampled to another grid."""
    rows, columns = (_between(np.arange(new) * old / new, old) for new, old in zip(grid, table.shape, strict=False))
    return np.einsum("ia,jb,abd->ijd", rows, columns, table).astype(table.dtype)


def resample_bias(
    table: Float[np.ndarray, "*layers n h"], old: tuple[int, int], new: tuple[int, int]
) -> Float[np.ndarray, "*layers n2 h"]:
    """Offset biases, indexed by `mdt.relative_index`, resampled to another grid; extra rows are kept."""
    count = (2 * old[0] - 1) * (2 * old[1] - 1)
    body = table[..., :count, :].reshape(*table.shape[:-2], 2 * old[0] - 1, 2 * old[1] - 1, table.shape[-1])
    ways = [
        _between(np.arange(1 - fine, fine) * coarse / fine + coarse - 1, 2 * coarse - 1)
        for fine, coarse in zip(new, old, strict=True)
    ]
    body = np.einsum("ia,jb,...abh->...ijh", *ways, body).astype(table.dtype)
    body = body.reshape(*table.shape[:-2], -1, table.shape[-1])
    return np.concatenate([body, table[..., count:, :]], axis=-2)


def _between(points: np.ndarray, count: int) -> Float[np.ndarray, "points count"]:
    """The matrix that interpolates values at 0 .. count-1 at these points, clamped at both ends."""
    points = np.clip(points, 0, count - 1)
    return np.maximum(0, 1 - np.abs(points[:, None] - np.arange(count)))
