"""Batch sharding inside a traced program, whose mesh is set while it is traced."""

from __future__ import annotations

import math

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


def platform() -> str:
    """The platform that the program being traced is for: that of its mesh, otherwise the default one.

    NVIDIA GPUs are "cuda", others keep their backend's name. A program may be traced for devices that are not present.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    backend = jax.default_backend()
    name = backend if device is None else device.platform
    if name != "gpu":
        return name
    here = backend == "gpu"
    return "cuda" if not here or "cuda" in jax.devices()[0].client.platform_version else "rocm"


def device_kind() -> str:
    """The kind of device that the program being traced is for, such as "TPU v5 lite"."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0].device_kind if device is None else device.device_kind


def heads_spec() -> PartitionSpec | None:
    """How the program being traced shards arrays [b n heads d]; None on a single device."""
    sharding = batch_sharding()
    if sharding is None:
        return None
    heads = "tensor" if "tensor" in sharding.mesh.axis_names else None
    return PartitionSpec(*sharding.spec, None, heads)


def divides(shape: tuple[int, ...]) -> bool:
    """Whether each device can take its own part of an array [b n heads d]: with several devices, a mesh must say so."""
    spec = heads_spec()
    if spec is None:
        return jax.sharding.get_abstract_mesh().size == 1 or jax.device_count() == 1
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    for side, axes in zip(shape, spec, strict=False):
        names = (axes,) if isinstance(axes, str) else axes or ()
        if side % math.prod(sizes[name] for name in names):
            return False
    return True
