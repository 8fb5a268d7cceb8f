"""Arrays in `.msgpack` files, as Flax modules of the diffusers library were saved, under that library's usual names.

A file holds nested dicts of arrays and nothing that runs. Modules of a list are `down_blocks_0` there and
`down_blocks.0` in the names that the maps of this package use; kernels are transposed, scales are weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

import msgpack
import numpy as np
from flax.serialization import msgpack_restore

from jaxdiff.files import DamagedFile

Name: TypeAlias = tuple[str, ...]  # of an array: the modules around it, and its own
LISTS = (
    *("down_blocks", "up_blocks", "resnets", "attentions", "transformer_blocks", "downsamplers", "upsamplers"),
    *("to_out", "net", "layers"),
)
LEAVES = {"kernel": "weight", "scale": "weight", "embedding": "weight"}
DEPTH = 32  # of nested dicts, more than any network has


def read(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file by the names of the diffusers library."""
    try:
        tree = msgpack_restore(path.read_bytes())
    except (ValueError, TypeError, KeyError, msgpack.UnpackException, RecursionError) as error:
        raise DamagedFile(f"{path} is damaged, or no file of flax.serialization: {error}; download it again") from error
    if not isinstance(tree, Mapping):
        raise DamagedFile(f"{path} holds a {type(tree).__name__}, expected named arrays; download it again")
    return dict(public(name, array) for name, array in _leaves(tree, (), path))


def _leaves(tree: Mapping[str, object], above: Name, path: Path) -> Iterator[tuple[Name, np.ndarray]]:
    if len(above) > DEPTH:
        raise DamagedFile(f"{path} nests dicts more than {DEPTH} deep, as no network does; download it again")
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*above, str(name)), path)
        elif isinstance(value, np.ndarray):
            yield (*above, str(name)), value
        else:
            where = ".".join((*above, str(name)))
            raise DamagedFile(f"{path}: {where} is a {type(value).__name__}, expected an array; download it again")


def public(name: Name, array: np.ndarray) -> tuple[str, np.ndarray]:
    """The public name and layout of a parameter of a Flax module."""
    *modules, leaf = name
    if modules[:1] == ["params"]:
        modules = modules[1:]
    parts = [re.sub(rf"^({'|'.join(LISTS)})_(\d+)$", r"\1.\2", part) for part in modules]
    if leaf == "kernel":
        array = array.T if array.ndim == 2 else array.transpose(array.ndim - 1, array.ndim - 2, *range(array.ndim - 2))
    return ".".join([*parts, LEAVES.get(leaf, leaf)]), array
