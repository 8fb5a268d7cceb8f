"""Features of many images on disk: shards of a fixed number of images, one array per activation, and an index.

    folder/index.json        names, shapes, types, the number of images, metadata
    folder/00000.npz ...     {name: [images ...]}; every shard but the last is full

Writing holds one shard and one batch in memory, reading one shard, regardless of the number of images.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxdiff.files import read_json, read_npz
from jaxdiff.trees import AnyArray

Rows = dict[str, np.ndarray]


def write(
    folder: str | os.PathLike, batches: Iterable[Mapping[str, AnyArray]], shard: int = 1024, about: object = None
) -> Path:
    """Store rows {name: [b ...]} and return the folder, which must be new or empty. `about` goes into the index."""
    folder = Path(folder)
    if shard < 1 or (folder.exists() and any(folder.iterdir())):
        raise ValueError(f"features need a new or empty folder and shard >= 1, got {folder}, {shard=}")
    folder.mkdir(parents=True, exist_ok=True)
    size, number, spec = 0, 0, None
    for number, rows in enumerate(_shards(batches, shard), start=1):
        spec = spec or {name: {"shape": value.shape[1:], "dtype": str(value.dtype)} for name, value in rows.items()}
        stored: dict[str, Any] = {name: _storable(value) for name, value in rows.items()}
        np.savez(folder / f"{number - 1:05d}.npz", **stored)
        size += len(next(iter(rows.values())))
    if spec is None:
        raise ValueError("there are no features to store: the iterable of batches is empty (or already consumed)")
    index = {"size": size, "shards": number, "shard": shard, "features": spec, "about": about}
    (folder / "index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
    return folder


def _shards(batches: Iterable[Mapping[str, AnyArray]], size: int) -> Iterator[Rows]:
    """Batches of any size regrouped into rows of `size`."""
    held: Rows = {}
    for batch in batches:
        new = {name: np.asarray(value) for name, value in batch.items()}
        if held and {n: v.shape[1:] for n, v in new.items()} != {n: v.shape[1:] for n, v in held.items()}:
            raise ValueError(f"a batch of features {list(new)} after batches of {list(held)}, or of other shapes")
        held = {name: np.concatenate([held[name], value]) if held else value for name, value in new.items()}
        while len(next(iter(held.values()))) >= size:
            yield {name: value[:size] for name, value in held.items()}
            held = {name: value[size:] for name, value in held.items()}
    if held and len(next(iter(held.values()))):
        yield held


def _storable(value: np.ndarray) -> np.ndarray:
    """.npz has no bfloat16: its bits are stored."""
    return value.view(np.uint16) if value.dtype == jnp.bfloat16 else value


def index(folder: str | os.PathLike) -> dict[str, Any]:
    """The index that `write` stored: size, shards, features, about."""
    path = Path(folder) / "index.json"
    if not path.is_file():
        raise FileNotFoundError(f"no features at {path.resolve()}; features.store.write creates them")
    return read_json(path, "the index of stored features")


def read(folder: str | os.PathLike, names: Iterable[str] | None = None) -> Iterator[Rows]:
    """The shards in order, as {name: [images ...]}; only `names` when given."""
    noted = index(folder)
    names = list(noted["features"]) if names is None else list(names)
    for name in names:
        if name not in noted["features"]:
            raise ValueError(f"{folder} has no {name!r}; it has {', '.join(noted['features'])}")
    for i in range(noted["shards"]):
        arrays = read_npz(Path(folder) / f"{i:05d}.npz", names)
        yield {name: _restored(arrays[name], noted["features"][name]["dtype"]) for name in names}


def _restored(value: np.ndarray, dtype: str) -> np.ndarray:
    return value.view(jnp.bfloat16) if dtype == "bfloat16" else value
