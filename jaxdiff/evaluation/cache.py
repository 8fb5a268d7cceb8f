"""Features of images kept on disk by the content of each image, so that no image passes a network twice.

A folder per network and resizing holds pairs of files that are only appended to: 32 bytes of SHA-256 per image, and its
features in float32. Every writer has a pair of its own; rows without both parts, left by a crash, are ignored.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxdiff.evaluation.features import Batch, Extracted, FeatureNet, extract, images_of
from jaxdiff.evaluation.frechet import Moments, update

HASH = 32  # bytes


class FeatureCache:
    """The known features of one network; `rows` by the hash of an image."""

    def __init__(self, folder: str | os.PathLike, net: FeatureNet) -> None:
        identity = {"name": net.name, "sha256": net.sha256, "resize": net.resize}
        key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        self.folder = Path(folder).expanduser() / f"{net.name}-{net.resize}-{key[:12]}"
        self.rows: dict[bytes, np.ndarray] = {}
        self.writer: Path | None = None
        for names in sorted(self.folder.glob("*.sha256")):
            self._read(names)

    def _read(self, names: Path) -> None:
        width = int(names.stem.rsplit("-", 1)[1])
        keys = names.read_bytes()
        values = np.fromfile(names.with_suffix(".f32"), np.float32)
        count = min(len(keys) // HASH, len(values) // width)
        table = values[: count * width].reshape(count, width)
        self.rows |= {keys[i * HASH : (i + 1) * HASH]: table[i] for i in range(count)}

    def add(self, keys: list[bytes], rows: np.ndarray) -> None:
        """Append rows [n, d]; features first, so that a hash without features cannot remain after a crash."""
        if self.writer is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.writer = self.folder / f"{secrets.token_hex(8)}-{rows.shape[1]}.sha256"
        rows = np.ascontiguousarray(rows, np.float32)
        for path, content in ((self.writer.with_suffix(".f32"), rows.tobytes()), (self.writer, b"".join(keys))):
            with open(path, "ab") as file:
                file.write(content)
        self.rows |= dict(zip(keys, rows, strict=True))


def image_keys(images: np.ndarray) -> list[bytes]:
    """The hash of each image: its dtype, shape and pixels."""
    head = f"{images.dtype.str}{images.shape[1:]}".encode()
    return [hashlib.sha256(head + image.tobytes()).digest() for image in images]


def extract_cached(
    net: FeatureNet,
    batches: Iterable[Batch],
    cache: FeatureCache,
    sharding: NamedSharding | None = None,
    *,
    batch_size: int | None = None,
    keep: bool = False,
) -> Extracted:
    """As `extract`, without probabilities; only images that the cache does not know pass the network.

    Each batch is stored when it is done, so an interrupted extraction resumes there.
    """
    if jax.process_count() > 1:
        raise ValueError("the feature cache belongs to one process; with several, set eval.cache='' to go without it")
    moments: Moments | None = None
    kept: list[np.ndarray] = []
    for batch in batches:
        images = images_of(batch)
        size = batch_size = batch_size or len(images)
        keys = image_keys(images)
        missing = [i for i, key in enumerate(keys) if key not in cache.rows and key not in keys[:i]]
        for start in range(0, len(missing), size):
            part = missing[start : start + size]
            found = extract(net, [images[part]], sharding, batch_size=size, keep=True)
            assert found.features is not None
            cache.add([keys[i] for i in part], found.features)
        features = np.stack([cache.rows[key] for key in keys])
        moments = update(moments, features)
        kept += [features] * keep
    if moments is None:
        raise ValueError("no images to extract features from: the iterable of batches is empty (or already consumed)")
    return Extracted(moments, np.concatenate(kept) if keep else None)
