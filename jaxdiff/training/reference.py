"""The reference side of an evaluation: the feature network of a config, and features of its data, cached or stored."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from ml_collections import ConfigDict

from jaxdiff import evaluation
from jaxdiff.evaluation import Extracted, FeatureCache, FeatureNet, Protocol
from jaxdiff.evaluation.presets import resolved
from jaxdiff.placement import BATCH

BATCH_SIZE = 256


def network(config: ConfigDict) -> FeatureNet:
    """The feature network that `eval` asks for."""
    c = resolved(config.eval)
    if c.sfid and c.net != "inception":
        raise ValueError(f"eval.sfid needs the spatial features of eval.net='inception', got {c.net!r}; unset it")
    return evaluation.feature_net(c.net, c.weights or None, resize=c.resize)


def features(
    config: ConfigDict, net: FeatureNet, batches: Iterator[Any], mesh: Mesh | None = None, *, keep: bool = True
) -> Extracted:
    """Features of reference images, over the devices of `mesh`; those of networks from files are cached on disk."""
    c = resolved(config.eval)
    sharding = NamedSharding(mesh, BATCH) if mesh is not None and mesh.size > 1 else None
    if c.cache and c.weights and jax.process_count() == 1:
        cache = FeatureCache(c.cache, net, spatial=c.sfid)
        return evaluation.extract_cached(cache, batches, sharding, batch_size=BATCH_SIZE, keep=keep)
    return evaluation.extract(net, batches, sharding, batch_size=BATCH_SIZE, keep=keep)


def shares(total: int, mesh: Mesh | None, size: int = BATCH_SIZE) -> Iterator[tuple[int, int]]:
    """Positions (start, stop) of batches of at most `size`: all, or with a mesh as many for each of its processes."""
    processes, process = (1, 0) if mesh is None else (jax.process_count(), jax.process_index())
    if total < processes:
        raise ValueError(f"{total} reference images cannot be shared by {processes} processes; raise eval.reference")
    batches = -(-total // (size * processes)) * processes
    edges = np.arange(batches + 1) * total // batches
    for i in range(process, batches, processes):
        yield int(edges[i]), int(edges[i + 1])


def write_stats(path: str | os.PathLike, found: Extracted, protocol: Protocol) -> None:
    """Reference statistics with the protocol that gave them, which `read_stats` compares with that of an evaluation."""
    record = json.dumps(dataclasses.asdict(protocol), sort_keys=True)
    evaluation.save_moments(path, found.moments, spatial=found.spatial, protocol=record)


def read_stats(path: str | os.PathLike, config: ConfigDict) -> Extracted:
    """Moments of features and, if the file has them, of spatial features.

    `eval.reference` is the number of images of a file that does not say. A file with a protocol must be of the network
    and the resizing that `eval` asks for.
    """
    c = resolved(config.eval)
    moments, spatial, stored = evaluation.load_stats(path, default_count=c.reference or None)
    if c.sfid and spatial is None:
        raise ValueError(f"{path} has no mu_s and sigma_s, which sFID needs; set eval.sfid=False, or eval.preset=edm")
    if stored is None:
        return Extracted(moments, spatial=spatial)
    known, net = json.loads(stored), network(config)
    for field, wanted in (("feature_net", net.name), ("feature_sha256", net.sha256), ("resize", net.resize)):
        if known[field] != wanted:
            raise ValueError(
                f"{path} was computed with {field}={known[field]!r}, this evaluation has {wanted!r}; "
                "distances between the two mean nothing: write the statistics again, or change eval to match"
            )
    return Extracted(moments, spatial=spatial)
