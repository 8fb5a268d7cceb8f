"""Named arrays in `.npz`, `.safetensors` and (read only) `.msgpack` files. Pickle is never used.

A `.safetensors` file written here has a checksum of its arrays and metadata, which is verified when it is read; files
of others have none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxdiff.checksums import digest_of
from jaxdiff.files import CHECKSUM, DamagedFile, read_npz, replacing
from jaxdiff.remote import local
from jaxdiff.trees import AnyArray
from jaxdiff.weights import msgpack

Source = Mapping[str, AnyArray] | str | os.PathLike


def read(source: Source) -> dict[str, np.ndarray]:
    """The named arrays of a dict, or of an `.npz`, `.safetensors` or Flax `.msgpack` file."""
    if isinstance(source, Mapping):
        return {name: np.asarray(array) for name, array in source.items()}
    path = local(source)
    if path.suffix not in (".npz", ".safetensors", ".msgpack"):
        raise ValueError(
            f"cannot read weights from {path.name!r}: give a dict of arrays, a .npz, a .safetensors or a Flax .msgpack "
            "file; docs/weights.md shows how to convert a pickled checkpoint in a separate environment"
        )
    if not path.is_file():
        raise FileNotFoundError(f"no weights at {path}; tried {path.resolve()}")
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    if path.suffix == ".msgpack":
        return msgpack.read(path)
    return {name: _named(array) for name, array in read_npz(path).items()}


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    try:
        with safe_open(path, framework="numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not iterable)
            metadata = file.metadata() or {}
    except (SafetensorError, ValueError, TypeError, OSError) as error:
        raise DamagedFile(_damage(path, str(error))) from error
    known = metadata.pop(CHECKSUM, None)
    if known is not None and known != digest_of(arrays, metadata):
        raise DamagedFile(_damage(path, "its contents do not match its checksum"))
    return arrays


def _damage(path: Path, how: str) -> str:
    return f"{path} is damaged or truncated: {how}; copy or export it again"


def metadata(path: str | os.PathLike) -> dict[str, str]:
    """The metadata of a `.safetensors` file, without reading its arrays."""
    try:
        with safe_open(local(path), framework="numpy") as file:
            return file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise DamagedFile(_damage(Path(path), str(error))) from error


def names(path: str | os.PathLike) -> list[str]:
    """The names of the arrays in a `.safetensors` file, without reading them."""
    try:
        with safe_open(local(path), framework="numpy") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise DamagedFile(_damage(Path(path), str(error))) from error


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
    with replacing(path) as partial:
        if path.suffix == ".npz":
            np.savez(partial, **arrays)
            return
        found = {name: np.asarray(array, order="C") for name, array in arrays.items()}
        known = dict(metadata or {})
        try:
            save_file(found, partial, {**known, CHECKSUM: digest_of(found, known)})
        except SafetensorError as error:  # of the file system, as a full disk
            raise OSError(f"{error}") from error
        _sort_metadata(partial)


def _sort_metadata(path: Path) -> None:
    """Order the metadata in the header of a `.safetensors` file by name, so that equal contents are equal files."""
    with open(path, "r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) <= size:
            file.seek(8)
            file.write(text.ljust(size))
