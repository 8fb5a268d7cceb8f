"""Parameters of another run, or public ones, as the start of this one: at a new resolution, with new conditions.

    same name and shape          copied
    positions of another grid    resampled (MDT): the new token i of S stands at i S0 / S of the old grid of S0, values
                                 between two old ones are linear; biases by offset likewise, held beyond the last
    where conditions come in     left fresh if they differ: classes to text, another text encoder, control added
    anything else                refused: it belongs to another network

Positions that are computed (DiT, PixArt, MMDiT) are no parameters: model.fields.grid and .positions resample them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxdiff.trees import by_name, misfits, path_name

# the layers that conditions enter a network by
INPUTS = re.compile(
    r"(^|/)(label|map_label|map_augment|text|text_mlp|null_text|pooled|added|control_embed|cross_attention/kv)(/|$)"
)


def fit(found: Mapping[str, Any], params: Any, source: Any) -> dict[str, Any]:
    """Those of the arrays `found` that the network with these `params` (or their shapes) starts from, by name."""
    wanted = by_name(params)
    found = resampled(found, wanted)
    fits = {name for name in found if name in wanted and tuple(found[name].shape) == tuple(wanted[name].shape)}
    renewed = {_layer(name) for name in {*found, *wanted} - fits}  # whole layers: no old bias beside a new kernel
    theirs, ours = ({n: a for n, a in arrays.items() if not INPUTS.search(n)} for arrays in (found, wanted))
    wrong = misfits(theirs, ours)
    if wrong:
        raise ValueError(
            f"{source} belongs to another model: {wrong}; weights of another width, depth or patch cannot be taken "
            "over: give model.fields the values of that run (its config.json), or start without train.init_from"
        )
    return {name: found[name] for name in wanted if name in fits and _layer(name) not in renewed}


def _layer(name: str) -> str:
    return name.rsplit("/", 1)[0]


def put(kept: Mapping[str, Any], fresh: Any) -> Any:
    """The parameters `fresh` with the arrays of `kept` in their places."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: jnp.array(kept.get(path_name(path), leaf)), fresh)


def report(kept: Mapping[str, Any], params: Any) -> str:
    """What is taken over and what is new, for people."""
    new = sorted({_layer(name) for name in by_name(params) if name not in kept})
    return f"{len(kept)} arrays copied, " + (f"new: {', '.join(new)}" if new else "nothing is new")


# ------------------------------------------------------------------------------------------ tables of positions


def resampled(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """`found` with an MDT's tables of positions on the grid of `wanted`."""
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
    """Trained positions on another grid."""
    rows, columns = (_between(np.arange(new) * old / new, old) for new, old in zip(grid, table.shape, strict=False))
    return np.einsum("ia,jb,abd->ijd", rows, columns, table).astype(table.dtype)


def resample_bias(
    table: Float[np.ndarray, "*layers n h"], old: tuple[int, int], new: tuple[int, int]
) -> Float[np.ndarray, "*layers n2 h"]:
    """Biases by offset, numbered as `mdt.relative_index` does, on another grid; rows beyond the offsets are kept."""
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
    """The matrix that interpolates values at 0 .. count-1 at these points, those outside at the nearest end."""
    points = np.clip(points, 0, count - 1)
    return np.maximum(0, 1 - np.abs(points[:, None] - np.arange(count)))
