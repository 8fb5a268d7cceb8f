"""Batch sharding inside a traced program, whose mesh is set while it is traced."""

from __future__ import annotations

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxdiff.trees import Tree

BATCH_AXES = ("data", "fsdp")  # mesh axes that shard the batch
BATCH = PartitionSpec(BATCH_AXES)


def batch_sharding() -> NamedSharding | None:
    """How the program being traced shards a batch; None on a single device."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = tuple(name for name in BATCH_AXES if name in mesh.axis_names)
    if not axes or mesh.size == 1:
        return None
    return NamedSharding(mesh, PartitionSpec(axes))


def along_batch(tree: Tree) -> Tree:
    """Constrain arrays [b ...] to be sharded like the batch.

    Otherwise the compiler may shard token width like the parameters and reshard at every step, or make every device
    compute the whole of an array that is drawn inside the program.
    """
    sharding = batch_sharding()
    if sharding is None:
        return tree
    return jax.lax.with_sharding_constraint(tree, sharding.spec)
