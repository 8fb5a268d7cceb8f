"""Named arrays in `.npz` and `.safetensors` files. Pickle is never used."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from jaxdiff.trees import AnyArray

Source = Mapping[str, AnyArray] | str | os.PathLike


def read(source: Source) -> dict[str, np.ndarray]:
    """The named arrays of a dict, an `.npz` or a `.safetensors` file."""
    if isinstance(source, Mapping):
        return {name: np.asarray(array) for name, array in source.items()}
    path = Path(source)
    if path.suffix not in (".npz", ".safetensors"):
        raise ValueError(
            f"cannot read weights from {path.name!r}: give a dict of arrays, a .npz or a .safetensors file; "
            "docs/weights.md shows how to convert a pickled checkpoint in a separate environment"
        )
    if not path.is_file():
        raise FileNotFoundError(f"no weights at {path}; tried {path.resolve()}")
    if path.suffix == ".safetensors":
        return load_file(path)
    with np.load(path, allow_pickle=False) as arrays:
        return {name: _named(arrays[name]) for name in arrays.files}


def names(path: str | os.PathLike) -> list[str]:
    """The names of the arrays in a `.safetensors` file, without reading them."""
    with safe_open(path, framework="numpy") as file:
        return list(file.keys())


def _named(array: np.ndarray) -> np.ndarray:
    """.npz files keep the bytes of bfloat16 arrays but lose the dtype."""
    if array.dtype.kind == "V" and array.dtype.itemsize == 2:
        return array.view(jnp.bfloat16)
    return array


def write(path: str | os.PathLike, arrays: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> None:
    """Write named arrays in the format of the suffix; atomically. `metadata` is for .safetensors."""
    path = Path(path)
    if path.suffix not in (".npz", ".safetensors"):
        raise ValueError(f"cannot write weights to {path.name!r}: the name must end in .npz or .safetensors")
    handle, partial = tempfile.mkstemp(dir=path.parent, suffix=path.suffix)
    os.close(handle)
    try:
        if path.suffix == ".npz":
            np.savez(partial, **arrays)
        else:
            found = {name: np.asarray(array, order="C") for name, array in arrays.items()}
            save_file(found, partial, dict(metadata or {}))
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise
