"""Maps between public checkpoint names and our parameter trees, strict in both directions.

A map is a list of `Entry`: which public arrays form one of our parameters, and how they convert into each other.
`to_public` uses array methods only, so that shapes can be derived without holding a model in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxdiff.conventions import Convention
from jaxdiff.trees import AnyArray, Params

Path = tuple[str, ...]
Arrays: TypeAlias = Mapping[str, np.ndarray]  # by public name
Fields: TypeAlias = dict[str, Any]  # of a model, None where unknown


class WeightsError(ValueError):
    """A checkpoint that does not match, with every kind of mismatch counted and named."""


class Layout(NamedTuple):
    """Conversion of public arrays to one of our parameters and back."""

    to_ours: Callable[..., np.ndarray]
    to_public: Callable[[AnyArray], tuple]


class Entry(NamedTuple):
    """Public names, the path of our parameter, and the layout between them."""

    public: tuple[str, ...]
    path: Path
    layout: Layout


class Kind(NamedTuple):
    """One family of public checkpoints."""

    model: type[nn.Module]
    infer: Callable[[Arrays], Fields]  # from names and shapes; None for a field that they do not determine
    entries: Callable[..., list[Entry]]  # (model, abstract params) -> the map
    conventions: tuple[Convention, ...] = ()  # of its networks, the default first; empty: not a denoiser
    constants: Callable[..., dict[str, np.ndarray]] = lambda model: {}  # public arrays that we compute
    ignored: Callable[[str], bool] = lambda name: False  # public arrays to ignore
    example: Callable[..., tuple] | None = None  # arguments of init, if not (x, noise_label, cond)
    named: Callable[[Arrays], Kind] | None = None  # the variant of the kind that matches these names
    renamed: Callable[[Arrays], Arrays] = lambda arrays: arrays  # from another release's names and shapes


as_is = Layout(lambda w: w, lambda w: (w,))
dense = Layout(lambda w: w.T, lambda k: (k.T,))  # [out, in] <-> [in, out]
conv = Layout(lambda w: w.transpose(2, 3, 1, 0), lambda k: (k.transpose(3, 2, 0, 1),))  # OIHW <-> HWIO


def patch_conv(patch: int, channels: int) -> Layout:
    """A convolution over whole patches <-> a Dense over patches flattened (row, column, channel)."""
    return Layout(
        lambda w: w.transpose(2, 3, 1, 0).reshape(-1, w.shape[0]),
        lambda k: (k.reshape(patch, patch, channels, -1).transpose(3, 2, 0, 1),),
    )


def qkv_kernel(heads: int, parts: int = 3) -> Layout:
    """Rows [q; k; v], or with two parts [k; v], each head-major <-> [in, parts, heads, head width]."""
    return Layout(
        lambda w: w.reshape(parts, heads, -1, w.shape[1]).transpose(3, 0, 1, 2),
        lambda k: (k.transpose(1, 2, 3, 0).reshape(-1, k.shape[0]),),
    )


def qkv_bias(heads: int, parts: int = 3) -> Layout:
    """[q; k; v], or with two parts [k; v] <-> [parts, heads, head width]."""
    return Layout(lambda b: b.reshape(parts, heads, -1), lambda b: (b.reshape(-1),))


def query_kernel(heads: int) -> Layout:
    """Head-major rows [out, in] <-> [in, heads, head width]."""
    return Layout(lambda w: w.T.reshape(w.shape[1], heads, -1), lambda k: (k.reshape(k.shape[0], -1).T,))


def query_bias(heads: int) -> Layout:
    """[out] <-> [heads, head width]."""
    return Layout(lambda b: b.reshape(heads, -1), lambda b: (b.reshape(-1),))


def out_kernel(heads: int) -> Layout:
    """[out, heads x head width] <-> [heads, head width, out]."""
    return Layout(
        lambda w: w.reshape(w.shape[0], heads, -1).transpose(1, 2, 0),
        lambda k: (k.transpose(2, 0, 1).reshape(k.shape[2], -1),),
    )


def split_rows(layout: Layout, parts: int) -> Layout:
    """The layout with the rows split into `parts` arrays of equal size."""

    def to_public(ours: AnyArray) -> tuple:
        (fused,) = layout.to_public(ours)
        d = fused.shape[0] // parts
        return tuple(fused[i * d : (i + 1) * d] for i in range(parts))

    return Layout(lambda *arrays: layout.to_ours(np.concatenate(arrays)), to_public)


def split_three(layout: Layout) -> Layout:
    """The layout with queries, keys and values in three arrays."""
    return split_rows(layout, 3)


def swapped_halves(layout: Layout) -> Layout:
    """The layout with the two halves of the output rows exchanged: (scale, shift) <-> (shift, scale)."""

    def swap(w: AnyArray) -> AnyArray:
        return w.reshape(2, -1, *w.shape[1:])[::-1].reshape(w.shape)

    return Layout(lambda w: layout.to_ours(swap(w)), lambda k: tuple(swap(w) for w in layout.to_public(k)))


def dense_entries(public: str, path: Path, layout: Layout = dense, bias_layout: Layout = as_is) -> list[Entry]:
    """Weight and bias of a Dense layer."""
    return [
        Entry((f"{public}.weight",), (*path, "kernel"), layout),
        Entry((f"{public}.bias",), (*path, "bias"), bias_layout),
    ]


def qkv_entries(heads: int, public: str, parts: tuple[str, ...], path: Path) -> list[Entry]:
    """Queries, keys and values stored in three arrays each for weight and bias."""
    kernel, bias = (split_three(layout(heads)) for layout in (qkv_kernel, qkv_bias))
    return [
        Entry(tuple(f"{public}.{part}.weight" for part in parts), (*path, "kernel"), kernel),
        Entry(tuple(f"{public}.{part}.bias" for part in parts), (*path, "bias"), bias),
    ]


def to_params(name: str, kind: Kind, model: nn.Module, abstract: Params, arrays: Arrays) -> dict:
    """Our float32 parameters from public arrays; anything missing, unexpected or mis-shaped is an error."""
    entries, constants, leaves = kind.entries(model, abstract), kind.constants(model), flatten_dict(abstract)
    expected: dict[str, tuple[int, ...]] = {}
    for entry in entries:
        public = jax.eval_shape(entry.layout.to_public, leaves[entry.path])
        expected |= {key: tuple(part.shape) for key, part in zip(entry.public, public, strict=True)}
    mismatches = {
        "missing": [key for key in expected if key not in arrays],
        "unexpected": [key for key in arrays if key not in expected and key not in constants and not kind.ignored(key)],
        "mis-shaped": [
            f"{key} is {arrays[key].shape}, expected {shape}"
            for key, shape in expected.items()
            if key in arrays and arrays[key].shape != shape
        ],
        "not the constants this model computes": [
            key
            for key, value in constants.items()
            if key in arrays and not np.allclose(arrays[key].astype(np.float32), value, atol=1e-2)
        ],
    }
    problems = [_report(what, keys) for what, keys in mismatches.items() if keys]
    if problems:
        raise WeightsError(
            f"these arrays are not a {name!r} checkpoint of {type(model).__name__} as inferred: {'; '.join(problems)}; "
            "use another kind, or remove overrides that the arrays contradict"
        )
    return unflatten_dict(
        {e.path: e.layout.to_ours(*(np.asarray(arrays[key], np.float32) for key in e.public)) for e in entries}
    )


def to_public(params: Params, entries: Sequence[Entry]) -> dict[str, np.ndarray]:
    """Public arrays from our parameters."""
    flat = flatten_dict(params)
    out: dict[str, np.ndarray] = {}
    for entry in entries:
        out |= dict(zip(entry.public, entry.layout.to_public(np.asarray(flat[entry.path])), strict=True))
    return out


def _report(what: str, names: list[str]) -> str:
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return f"{len(names)} {what} ({shown})"


def shape_of(kind: str, arrays: Arrays, name: str) -> tuple[int, ...]:
    """The shape of an array that determines the architecture."""
    if name not in arrays:
        raise WeightsError(f"not a {kind!r} checkpoint: it has no {name!r}; {_report('given', list(arrays))}")
    return arrays[name].shape


def count_of(arrays: Arrays, prefix: str) -> int:
    """The number of distinct indices after the prefix."""
    start = f"{prefix}."
    return len({name.removeprefix(start).split(".")[0] for name in arrays if name.startswith(start)})
