"""Sharding inside a traced program, whose mesh is set while it is traced.

Arrays [b ...] are split over the axes of the batch. With a `context` axis the tokens of a transformer [b n d] are also
split along n; attention then has all tokens of a part of the heads, and two all-to-alls lie between the two layouts.
"""

from __future__ import annotations

import math

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxdiff.trees import Tree

FSDP_AXES = ("fsdp", "fsdp_minor")  # two factors of one size, so that an array may be split along two of its axes
BATCH_AXES = ("data", *FSDP_AXES)  # mesh axes that shard the batch
BATCH = PartitionSpec(BATCH_AXES)


def ways(mesh: Mesh | AbstractMesh, axes: tuple[str, ...] = BATCH_AXES) -> int:
    """How many parts some axes of a mesh make; those it does not have count 1."""
    return math.prod(mesh.shape.get(name, 1) for name in axes)


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


def along_tokens(tree: Tree) -> Tree:
    """Constrain tokens [b n d] to be sharded over the batch and, where it divides n, over context."""
    sharding = batch_sharding()
    if sharding is None:
        return tree
    context = ways(sharding.mesh, ("context",))

    def place(x: jax.Array) -> jax.Array:
        split = context > 1 and x.ndim == 3 and x.shape[1] % context == 0
        spec = PartitionSpec(*sharding.spec, "context") if split else sharding.spec
        return jax.lax.with_sharding_constraint(x, spec)

    return jax.tree.map(place, tree)


def along_heads(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Constrain arrays [b n heads d] to be sharded over batch and heads, if the mesh has a context axis."""
    spec, mesh = heads_spec(), jax.sharding.get_abstract_mesh()
    if spec is None or ways(mesh, ("context",)) == 1:
        return arrays
    heads, parts = arrays[0].shape[2], ways(mesh, ("context", "tensor"))
    if heads % parts:
        raise ValueError(
            f"{heads} heads do not divide over mesh.context x mesh.tensor = {parts} devices, and with a context axis "
            f"each device attends with its own heads; choose a product that divides {heads}"
        )
    return tuple(jax.lax.with_sharding_constraint(x, spec) for x in arrays)


def platform() -> str:
    """The platform that the program being traced is for: that of its mesh, otherwise the default one.

    NVIDIA GPUs are "cuda", others keep their backend's name. A program may be traced for devices that are not present.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    backend = jax.default_backend()
    name = backend if device is None else _platform_of(device.device_kind)
    if name != "gpu":
        return name
    here = backend == "gpu"
    return "cuda" if not here or "cuda" in jax.devices()[0].client.platform_version else "rocm"


def _platform_of(kind: str) -> str:
    """The platform of a kind of device; jax 0.10.0 has no other way to tell."""
    if kind == "cpu":
        return "cpu"
    return "tpu" if kind.startswith("TPU") else "gpu"


def device_kind() -> str:
    """The kind of device that the program being traced is for, such as "TPU v5 lite"."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0].device_kind if device is None else device.device_kind


def heads_spec() -> PartitionSpec | None:
    """How the program being traced shards arrays [b n heads d] in attention; None on a single device."""
    sharding = batch_sharding()
    if sharding is None:
        return None
    heads = tuple(name for name in ("tensor", "context") if name in sharding.mesh.axis_names)
    return PartitionSpec(*sharding.spec, None, heads)


def divides(shape: tuple[int, ...]) -> bool:
    """Whether each device can take its own part of an array [b n heads d]: with several devices, a mesh must say so."""
    mesh = jax.sharding.get_abstract_mesh()
    if heads_spec() is None:
        return mesh.size == 1 or jax.device_count() == 1
    return shape[0] % ways(mesh) == 0 and shape[2] % ways(mesh, ("tensor", "context")) == 0
