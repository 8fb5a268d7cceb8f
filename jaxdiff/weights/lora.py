"""Low-rank updates under the diffusers library's names: LAYER.lora_A.weight [r, in] and LAYER.lora_B.weight [out, r].

A public kernel is ours with rows and columns in another order, split along its outputs, so the same map serves for the
factors: as W = u v' of one column u and one row v is mapped, so are u and v. Queries, keys and values have one kernel
here and three there, with equal A. The scale is in B, since readers without metadata take alpha = rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from flax.traverse_util import flatten_dict

from jaxdiff.models.low_rank import Adapters, Factors
from jaxdiff.weights.names import Entry, Layout, WeightsError

# kinds with the names of diffusers, and the component of a pipeline that they are
COMPONENTS = {
    "flux": "transformer",
    "sd3": "transformer",
    "pixart": "transformer",
    "sd_unet": "unet",
    "sdxl_unet": "unet",
}


def arrays_of(adapters: Adapters, entries: Sequence[Entry], prefix: str) -> dict[str, np.ndarray]:
    """The factors by public name; `adapters` of unrolled blocks."""
    if flatten_dict(adapters.full):
        raise WeightsError(
            f"parameters that the base lacks have no public names: {', '.join(flatten_dict(adapters.full, sep='/'))}; "
            "export a student without them (step_embed='')"
        )
    rules = {entry.path: entry for entry in entries}
    found: dict[str, np.ndarray] = {}
    low = flatten_dict(adapters.low, is_leaf=lambda _, value: isinstance(value, Factors))
    unknown = ["/".join(path) for path in low if path not in rules]
    if unknown:
        raise WeightsError(f"kernels without a public name: {', '.join(unknown)}; choose others by lora.targets")
    for path, factors in low.items():
        entry = rules[path]
        a, b = np.asarray(factors.a), adapters.scale * np.asarray(factors.b)
        for name, (down, up) in zip(entry.public, _public(entry.layout, a, b), strict=True):
            layer = prefix + name.removesuffix(".weight")
            found[f"{layer}.lora_A.weight"], found[f"{layer}.lora_B.weight"] = down, up
    return found


def _public(layout: Layout, a: np.ndarray, b: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """(A [r, in], B [out, r]) of each public array of a kernel's update a b; of convolutions, [r, in, ...]."""
    inner, outer = a.shape[:-1], b.shape[1:]
    rows: list[list[np.ndarray]] = []
    columns: list[list[np.ndarray]] = []
    for column, row in zip(np.moveaxis(a, -1, 0), b, strict=True):
        spread = np.broadcast_to(column.reshape(*inner, *(1,) * len(outer)), (*inner, *outer))
        rows.append([public[0] for public in layout.to_public(spread)])
        spread = np.broadcast_to(row.reshape(*(1,) * len(inner), *outer), (*inner, *outer))
        columns.append([public.reshape(len(public), -1)[:, 0] for public in layout.to_public(spread)])
    downs = [np.stack(parts) for parts in zip(*rows, strict=True)]
    ups = [np.stack(parts, axis=1) for parts in zip(*columns, strict=True)]
    return [(down, up.reshape(*up.shape, *(1,) * (down.ndim - 2))) for down, up in zip(downs, ups, strict=True)]
