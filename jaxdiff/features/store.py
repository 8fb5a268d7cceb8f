"""Features of many images on disk: shards of a fixed number of images, one array per activation, and an index.

    folder/index.json        names, shapes, types, the number of images, how they were made
    folder/00000.npz ...     {name: [images ...]}; every shard but the last is full

Writing holds one shard and one batch in memory, reading one shard, whatever the number of images.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdiff.features.capture import extract

Rows = dict[str, np.ndarray]


def write(
    folder: str | os.PathLike, batches: Iterable[Mapping[str, Any]], shard: int = 1024, about: Any = None
) -> Path:
    """Stores rows {name: [b ...]} and returns the folder, which must be new or empty. `about` goes into the index."""
    folder = Path(folder)
    if shard < 1 or (folder.exists() and any(folder.iterdir())):
        raise ValueError(f"features go into a new or empty folder in shards of 1 or more, got {folder}, {shard=}")
    folder.mkdir(parents=True, exist_ok=True)
    size, number, spec = 0, 0, None
    for number, rows in enumerate(_shards(batches, shard), start=1):
        spec = spec or {name: {"shape": value.shape[1:], "dtype": str(value.dtype)} for name, value in rows.items()}
        stored: dict[str, Any] = {name: _storable(value) for name, value in rows.items()}
        np.savez(folder / f"{number - 1:05d}.npz", **stored)
        size += len(next(iter(rows.values())))
    if spec is None:
        raise ValueError("there are no features to store: the iterable of batches is empty (or was used up before)")
    index = {"size": size, "shards": number, "shard": shard, "features": spec, "about": about}
    (folder / "index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
    return folder


def _shards(batches: Iterable[Mapping[str, Any]], size: int) -> Iterator[Rows]:
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
    """NumPy's files know no bfloat16: its bits are stored."""
    return value.view(np.uint16) if value.dtype == jnp.bfloat16 else value


def index(folder: str | os.PathLike) -> dict[str, Any]:
    """What `write` noted: size, shards, features, about."""
    path = Path(folder) / "index.json"
    if not path.is_file():
        raise FileNotFoundError(f"no features at {path.resolve()}; they are written whole by features.store.write")
    return json.loads(path.read_text(encoding="utf-8"))


def read(folder: str | os.PathLike, names: Iterable[str] | None = None) -> Iterator[Rows]:
    """The shards in order, as {name: [images ...]}; only `names` when given."""
    noted = index(folder)
    names = list(noted["features"]) if names is None else list(names)
    for name in names:
        if name not in noted["features"]:
            raise ValueError(f"{folder} has no {name!r}; it has {', '.join(noted['features'])}")
    for i in range(noted["shards"]):
        with np.load(Path(folder) / f"{i:05d}.npz", allow_pickle=False) as arrays:
            yield {name: _restored(arrays[name], noted["features"][name]["dtype"]) for name in names}


def _restored(value: np.ndarray, dtype: str) -> np.ndarray:
    return value.view(jnp.bfloat16) if dtype == "bfloat16" else value


def stream(
    model: Any,
    params: Any,
    batches: Iterable[Any],
    seed: int,
    sigma: Any,
    *,
    conditions: tuple[str, ...] = (),
    sharding: Any = None,
    **options: Any,
) -> Iterator[Rows]:
    """`extract` over batches of images (arrays, or dicts with `image` and the keys in `conditions`), for `write`.

    Image i of the whole stream gets the noise of (seed, i). A batch of fewer images than the first is padded, so that
    one program serves all. `sharding` spreads each batch, padded to a multiple of the devices. `options` are those
    of `extract`; with average=False the draws are the second axis, behind the images.
    """
    size, done, ways = 0, 0, 1 if sharding is None else sharding.num_devices
    for batch in batches:
        rows = batch if isinstance(batch, Mapping) else {"image": batch}
        count = len(rows["image"])
        size = size or -(-count // ways) * ways
        if count > size:
            raise ValueError(f"a batch of {count} images after batches of {size}; only the last may differ")
        padded = {key: _padded(rows[key], size) for key in ("image", *conditions)}
        cond = jax.device_put(padded, sharding)
        x0 = cond.pop("image")
        features = extract(model, params, x0, seed, sigma, cond or None, index=np.arange(done, done + size), **options)
        first = 0 if options.get("average", True) else 1
        yield {name: np.moveaxis(np.asarray(value), first, 0)[:count] for name, value in features.items()}
        done += count


def _padded(values: Any, size: int) -> np.ndarray:
    values = np.asarray(values)
    return np.concatenate([values, np.repeat(values[-1:], size - len(values), axis=0)])
