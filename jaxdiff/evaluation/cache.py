"""Features of images kept on disk by the content of each image, so that no image passes a network twice.

A folder per network, resizing and output holds pairs of files that are only appended to: 32 bytes of SHA-256 per image,
and its features in float32. Every writer has a pair of its own; rows without both parts, left by a crash, are ignored.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxdiff.evaluation.features import Batch, Extracted, FeatureNet, images_of, outputs
from jaxdiff.evaluation.frechet import Moments, update

HASH = 32  # bytes


class Table:
    """Rows of float32 by hash, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: dict[bytes, np.ndarray] = {}
        self.writer: Path | None = None
        for names in sorted(folder.glob("*.sha256")):
            width = int(names.stem.rsplit("-", 1)[1])
            keys, values = names.read_bytes(), np.fromfile(names.with_suffix(".f32"), np.float32)
            count = min(len(keys) // HASH, len(values) // width)
            table = values[: count * width].reshape(count, width)
            self.rows |= {keys[i * HASH : (i + 1) * HASH]: table[i] for i in range(count)}

    def add(self, keys: Sequence[bytes], rows: np.ndarray) -> None:
        """Append rows [n, d]; features first, so that no hash precedes its features after a crash."""
        if self.writer is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.writer = self.folder / f"{secrets.token_hex(8)}-{rows.shape[1]}.sha256"
        rows = np.ascontiguousarray(rows, np.float32)
        for path, content in ((self.writer.with_suffix(".f32"), rows.tobytes()), (self.writer, b"".join(keys))):
            with open(path, "ab") as file:
                file.write(content)
        self.rows |= dict(zip(keys, rows, strict=True))


class FeatureCache:
    """What is known of a network's outputs, `features` and on request `spatial`, in a folder."""

    def __init__(self, folder: str | os.PathLike, net: FeatureNet, *, spatial: bool = False) -> None:
        if jax.process_count() > 1:
            raise ValueError("the feature cache belongs to one process; with several, set eval.cache='' to do without")
        identity = {"name": net.name, "sha256": net.sha256, "resize": net.resize}
        key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        self.net = net
        self.folder = Path(folder).expanduser() / f"{net.name}-{net.resize}-{key[:12]}"
        self.tables = {name: Table(self.folder / name) for name in ("features", *["spatial"] * spatial)}

    def __contains__(self, key: bytes) -> bool:
        return all(key in table.rows for table in self.tables.values())


def image_keys(images: np.ndarray) -> list[bytes]:
    """The hash of each image: its dtype, shape and pixels."""
    head = f"{images.dtype.str}{images.shape[1:]}".encode()
    return [hashlib.sha256(head + image.tobytes()).digest() for image in images]


def extract_cached(
    cache: FeatureCache,
    batches: Iterable[Batch],
    sharding: NamedSharding | None = None,
    *,
    batch_size: int | None = None,
    keep: bool = False,
) -> Extracted:
    """As `extract` with the cache's network, without probabilities; only images not in the cache pass the network.

    What the network gives is stored call by call, so an interrupted extraction resumes there.
    """
    found: dict[str, Moments] = {}
    kept: list[np.ndarray] = []
    for batch in batches:
        images = images_of(batch)
        batch_size = batch_size or len(images)
        keys = image_keys(images)
        missing = {key: i for i, key in enumerate(keys) if key not in cache}
        _compute(cache, list(missing), images[list(missing.values())], sharding, batch_size)
        for name, table in cache.tables.items():
            rows = np.stack([table.rows[key] for key in keys])
            found[name] = update(found.get(name), rows)
            kept += [rows] * (keep and name == "features")
    if not found:
        raise ValueError("no images to extract features from: the iterable of batches is empty (or already consumed)")
    features = np.concatenate(kept) if keep else None
    return Extracted(found["features"], features, spatial=found.get("spatial"))


def _compute(
    cache: FeatureCache, keys: list[bytes], images: np.ndarray, sharding: NamedSharding | None, size: int
) -> None:
    """Add the outputs of images to the cache."""
    if not keys:
        return
    done = 0
    for rows in outputs(cache.net, [images], sharding, batch_size=size):
        count = len(rows["features"])
        for name, table in cache.tables.items():
            if name not in rows:
                raise ValueError(f"feature network {cache.net.name!r} has no {name} features; it has {', '.join(rows)}")
            table.add(keys[done : done + count], rows[name])
        done += count
