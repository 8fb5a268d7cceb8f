"""Where arrays live: a (data, fsdp, tensor) mesh, and rules from parameter paths to axes of it.

A batch is split over data and fsdp. A parameter is split over tensor where a rule names one of its axes (attention
heads, MLP width), and over fsdp along its largest remaining axis that divides; the rest is replicated. Optimizer
moments and averages end in the same path as their parameter, so the same rules place them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdiff.models.layers import BATCH_AXES
from jaxdiff.trees import path_name

AXES = ("data", "fsdp", "tensor")
BATCH = PartitionSpec(BATCH_AXES)
HOST = "pinned_host"  # the memory of a host that its devices read by themselves

# (path pattern, axis counted from the end): the axis that is split over `tensor`
TENSOR_RULES = (
    (r"(qkv|/kv|/q)/(kernel|bias)$", -2),
    (r"/position_bias$", -1),
    (r"(attention|[a-z]+_out|block)/?(out)?/kernel$", -3),
    (r"mlp/in/(kernel|bias)$", -1),
    (r"mlp/out/kernel$", -2),
)


def make_mesh(data: int = -1, fsdp: int = 1, tensor: int = 1, devices: Any = None) -> Mesh:
    """A mesh over all devices; one size may be -1 and takes what the others leave."""
    devices = jax.devices() if devices is None else devices
    sizes = {"data": data, "fsdp": fsdp, "tensor": tensor}
    free = [name for name, size in sizes.items() if size == -1]
    known = math.prod(size for size in sizes.values() if size != -1)
    bad = len(free) > 1 or any(size < 1 and size != -1 for size in sizes.values())
    if bad or (len(devices) % known if free else known != len(devices)):
        raise ValueError(
            f"a mesh of {sizes} does not fit {len(devices)} devices: the product must be {len(devices)}, "
            "and at most one size may be -1 (all that is left); the nearest that fits is "
            f"{_nearest(sizes, len(devices))}"
        )
    if free:
        sizes[free[0]] = len(devices) // known
    return Mesh(np.asarray(devices).reshape(tuple(sizes.values())), AXES)


def _nearest(sizes: Mapping[str, int], count: int) -> dict[str, int]:
    """The mesh of `count` devices with the smallest ratios to the sizes asked for; one that is not positive is free."""
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    found: list[tuple[int, ...]] = [
        (a, b, count // (a * b)) for a in divisors for b in divisors if count % (a * b) == 0
    ]

    def distance(mesh: tuple[int, ...]) -> float:
        return sum(abs(math.log(n / size)) for n, size in zip(mesh, sizes.values(), strict=True) if size > 0)

    best = min(found, key=distance)
    return dict(zip(sizes, best, strict=True))


def check_batch(batch_size: int, mesh: Mesh, parts: int = 1) -> None:
    """The global batch divides over the devices that split it, in every accumulation slice."""
    ways = mesh.shape["data"] * mesh.shape["fsdp"] * parts
    if batch_size % ways or batch_size < ways:
        nearest = max(ways, round(batch_size / ways) * ways)
        raise ValueError(
            f"a global batch of {batch_size} does not divide over {mesh.shape['data']} x {mesh.shape['fsdp']} "
            f"(data x fsdp) devices in {parts} part(s); the nearest batch that does is {nearest}"
        )


def spec_of(name: str, shape: tuple[int, ...], mesh: Mesh, min_size: int = 2**14) -> PartitionSpec:
    """The axes of one array; arrays below `min_size` elements are not split over fsdp."""
    axes: list[str | None] = [None] * len(shape)
    tensor, fsdp = mesh.shape["tensor"], mesh.shape["fsdp"]
    for pattern, axis in TENSOR_RULES:
        if tensor > 1 and re.search(pattern, name) and len(shape) >= -axis:
            if shape[axis] % tensor and "opt_state" in name:
                continue  # factored moments have axes of their own
            if shape[axis] % tensor:
                near = max(n for n in range(1, tensor) if shape[axis] % n == 0 and tensor % n == 0)
                raise ValueError(
                    f"{name} has {shape[axis]} heads or units along the tensor axis, which {tensor} devices "
                    f"do not divide; choose mesh.tensor among the divisors of {shape[axis]}, for example {near}"
                )
            axes[axis] = "tensor"
            break
    if fsdp > 1 and math.prod(shape) >= min_size:
        free = [i for i, axis in enumerate(axes) if axis is None and shape[i] % fsdp == 0]
        if free:
            axes[max(free, key=lambda i: (shape[i], i))] = "fsdp"
    return PartitionSpec(*axes)


def state_shardings(abstract: Any, mesh: Mesh, min_size: int = 2**14, offload: bool = False) -> Any:
    """The sharding of every array of a state, by its path; with `offload` what is frozen lives on the host."""

    def place(path: Any, leaf: Any) -> NamedSharding:
        name = path_name(path)
        sharding = NamedSharding(mesh, spec_of(name, leaf.shape, mesh, min_size))
        return sharding.with_memory_kind(HOST) if offload and name.startswith("frozen/") else sharding

    return jax.tree_util.tree_map_with_path(place, abstract)


def on_device(shardings: Any) -> Any:
    """The same shardings in the devices' own memory."""
    return jax.tree.map(lambda s: NamedSharding(s.mesh, s.spec), shardings)


def check_host_memory(device: Any) -> None:
    """The device can read its host's memory."""
    try:
        device.memory(HOST)
    except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as error:
        raise ValueError(
            f"teacher.offload=True keeps the teacher in {HOST} memory, which {device.device_kind} does not offer "
            f"({str(error).splitlines()[0]}); set it to False"
        ) from None


def with_shardings(abstract: Any, shardings: Any) -> Any:
    """Shapes that also say where the arrays live."""
    return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), abstract, shardings)


def global_batch(batch: Mapping[str, Any], mesh: Mesh) -> Any:
    """The global arrays of which each process holds its slice of the examples."""
    sharding = NamedSharding(mesh, BATCH)
    return jax.tree.map(lambda local: jax.make_array_from_process_local_data(sharding, local), dict(batch))


def along_batch(x: jax.Array, mesh: Mesh) -> jax.Array:
    """x inside a program, its first axis split as a batch is."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, BATCH))


def fetch(tree: Any) -> Any:
    """The whole arrays of a tree in NumPy, on every process; all of them must call it."""

    def whole(leaf: Any) -> Any:
        return (
            jax.device_get(leaf) if leaf.is_fully_addressable else multihost_utils.process_allgather(leaf, tiled=True)
        )

    return jax.tree.map(whole, tree)


def bytes_per_device(tree: Any) -> int:
    """Bytes of a (possibly abstract) sharded tree on one device, or for it on its host."""

    def size(leaf: Any) -> int:
        shape = leaf.sharding.shard_shape(leaf.shape) if getattr(leaf, "sharding", None) is not None else leaf.shape
        return math.prod(shape) * (leaf.dtype.itemsize if hasattr(leaf.dtype, "itemsize") else 4)

    return sum(size(leaf) for leaf in jax.tree.leaves(tree))
