"""The digest of a training state, whatever devices and processes hold it: what a checkpoint is verified by."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxdiff import checksums
from jaxdiff.trees import Tree, by_name


def state_digest(state: Tree) -> str:
    """The same on every process; each reads the shards it holds, and only sums are exchanged."""
    leaves = by_name(state)
    with ThreadPoolExecutor() as pool:  # NumPy computes outside Python's lock
        found = np.stack(list(pool.map(_held, leaves.values())))
    if jax.process_count() > 1:
        every = multihost_utils.process_allgather(found.view(np.uint32))  # JAX would cut integers of 64 bits
        found = checksums.add(np.ascontiguousarray(every).view(np.uint64))
    table = zip(leaves.items(), found, strict=True)
    return checksums.digest({name: (str(leaf.dtype), leaf.shape, sums) for (name, leaf), sums in table})


def _held(leaf: jax.Array) -> np.ndarray:
    """The sums of the parts of a global array that this process holds, without replicas."""
    parts = [
        checksums.sums(np.asarray(shard.data), leaf.shape, [axis.start or 0 for axis in shard.index])
        for shard in leaf.addressable_shards
        if shard.replica_id == 0
    ]
    return checksums.add(np.stack(parts)) if parts else np.zeros(2, np.uint64)
