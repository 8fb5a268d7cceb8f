"""Sharding: a (data, fsdp, tensor) mesh, and rules from parameter paths to mesh axes.

A batch is sharded over data and fsdp. A parameter is sharded over tensor along the axis that a rule names (attention
heads, MLP width), and over fsdp along its largest remaining divisible axis; otherwise it is replicated. The paths of
optimizer moments and averages end like those of their parameters, so the same rules apply to them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdiff.placement import BATCH
from jaxdiff.trees import Path, Tree, path_name

AXES = ("data", "fsdp", "tensor")
Devices: TypeAlias = Any  # a sequence of devices; None: all of them
HOST = "pinned_host"  # host memory that devices can read directly

# (path pattern, axis counted from the end) to shard over `tensor`
TENSOR_RULES = (
    (r"(qkv|/kv|/q)/(kernel|bias)$", -2),
    (r"/position_bias$", -1),
    (r"(attention|[a-z]+_out|block)/?(out)?/kernel$", -3),
    (r"mlp/in/(kernel|bias)$", -1),
    (r"mlp/out/kernel$", -2),
)


def make_mesh(data: int = -1, fsdp: int = 1, tensor: int = 1, devices: Devices = None) -> Mesh:
    """A mesh over all devices; one size may be -1 and is inferred from the others."""
    devices = jax.devices() if devices is None else devices
    sizes = {"data": data, "fsdp": fsdp, "tensor": tensor}
    free = [name for name, size in sizes.items() if size == -1]
    known = math.prod(size for size in sizes.values() if size != -1)
    bad = len(free) > 1 or any(size < 1 and size != -1 for size in sizes.values())
    if bad or (len(devices) % known if free else known != len(devices)):
        raise ValueError(
            f"a mesh of {sizes} does not fit {len(devices)} devices: the product must be {len(devices)}, "
            "and at most one size may be -1 (inferred); the nearest valid mesh is "
            f"{_nearest(sizes, len(devices))}"
        )
    if free:
        sizes[free[0]] = len(devices) // known
    return Mesh(np.asarray(devices).reshape(tuple(sizes.values())), AXES)


def _nearest(sizes: Mapping[str, int], count: int) -> dict[str, int]:
    """The mesh of `count` devices closest in ratio to the requested sizes; sizes that are not positive are free."""
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    found: list[tuple[int, ...]] = [
        (a, b, count // (a * b)) for a in divisors for b in divisors if count % (a * b) == 0
    ]

    def distance(mesh: tuple[int, ...]) -> float:
        return sum(abs(math.log(n / size)) for n, size in zip(mesh, sizes.values(), strict=True) if size > 0)

    best = min(found, key=distance)
    return dict(zip(sizes, best, strict=True))


def check_batch(batch_size: int, mesh: Mesh, parts: int = 1) -> None:
    """Check that the global batch divides over the devices that shard it, in every accumulation step."""
    ways = mesh.shape["data"] * mesh.shape["fsdp"] * parts
    if batch_size % ways or batch_size < ways:
        nearest = max(ways, round(batch_size / ways) * ways)
        raise ValueError(
            f"a global batch of {batch_size} does not divide over {mesh.shape['data']} x {mesh.shape['fsdp']} "
            f"(data x fsdp) devices in {parts} accumulation step(s); the nearest batch that does is {nearest}"
        )


def spec_of(name: str, shape: tuple[int, ...], mesh: Mesh, min_size: int = 2**14) -> PartitionSpec:
    """The sharding of one array; arrays with fewer than `min_size` elements are not sharded over fsdp."""
    axes: list[str | None] = [None] * len(shape)
    tensor, fsdp = mesh.shape["tensor"], mesh.shape["fsdp"]
    for pattern, axis in TENSOR_RULES:
        if tensor > 1 and re.search(pattern, name) and len(shape) >= -axis:
            if shape[axis] % tensor and "opt_state" in name:
                continue  # factored moments have other axes
            if shape[axis] % tensor:
                near = max(n for n in range(1, tensor) if shape[axis] % n == 0 and tensor % n == 0)
                raise ValueError(
                    f"{name} has {shape[axis]} heads or units along the tensor axis, not divisible by "
                    f"mesh.tensor={tensor}; choose one of the divisors of {shape[axis]}, for example {near}"
                )
            axes[axis] = "tensor"
            break
    if fsdp > 1 and math.prod(shape) >= min_size:
        free = [i for i, axis in enumerate(axes) if axis is None and shape[i] % fsdp == 0]
        if free:
            axes[max(free, key=lambda i: (shape[i], i))] = "fsdp"
    return PartitionSpec(*axes)


def state_shardings(abstract: Tree, mesh: Mesh, min_size: int = 2**14, offload: bool = False) -> Tree:
    """The sharding of every array of a state, by path; with `offload`, frozen arrays are in host memory."""

    def place(path: Path, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        name = path_name(path)
        sharding = NamedSharding(mesh, spec_of(name, leaf.shape, mesh, min_size))
        return sharding.with_memory_kind(HOST) if offload and name.startswith("frozen/") else sharding

    return jax.tree_util.tree_map_with_path(place, abstract)


def on_device(shardings: Tree) -> Tree:
    """The same shardings in device memory."""
    return jax.tree.map(lambda s: NamedSharding(s.mesh, s.spec), shardings)


def check_host_memory(device: Any) -> None:
    """Check that the device can read host memory."""
    try:
        device.memory(HOST)
    except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as error:
        raise ValueError(
            f"teacher.offload=True keeps the teacher in {HOST} memory, which {device.device_kind} does not support "
            f"({str(error).splitlines()[0]}); set it to False"
        ) from None


def with_shardings(abstract: Tree, shardings: Tree) -> Tree:
    """The shapes with their shardings."""
    return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), abstract, shardings)


def global_batch(batch: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """The global arrays assembled from each process's slice of the batch."""
    sharding = NamedSharding(mesh, BATCH)
    return jax.tree.map(lambda local: jax.make_array_from_process_local_data(sharding, local), dict(batch))


def fetch(tree: Tree) -> Tree:
    """The full arrays of a pytree in NumPy, on every process; all processes must call it."""

    def whole(leaf: jax.Array) -> np.ndarray:
        if leaf.is_fully_addressable:
            return jax.device_get(leaf)
        return multihost_utils.process_allgather(leaf, tiled=True)

    return jax.tree.map(whole, tree)


def bytes_per_device(tree: Tree) -> int:
    """Bytes that a (possibly abstract) sharded pytree takes per device, host memory included."""

    def size(leaf: jax.Array | jax.ShapeDtypeStruct) -> int:
        shape = leaf.shape
        if getattr(leaf, "sharding", None) is not None:
            shape = leaf.sharding.shard_shape(shape)
        return math.prod(shape) * getattr(leaf.dtype, "itemsize", 4)

    return sum(size(leaf) for leaf in jax.tree.leaves(tree))
