"""Sharding: a (data, fsdp, context, tensor) mesh, and rules from parameter paths to mesh axes.

A batch is sharded over data and fsdp, the tokens of a transformer over context. A parameter is sharded over tensor
along the axis that a rule names (attention heads, MLP width), and over fsdp and context along its largest remaining
divisible axis. fsdp is two axes of the mesh, a large and a small factor: where no axis of an array divides by the whole
(1,152 over 256), two of them are split. The paths of optimizer moments and averages end like those of their parameters,
so the same rules apply to them.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from jaxdiff.placement import BATCH, FSDP_AXES, ways
from jaxdiff.trees import Path, Tree, path_name

AXES = ("data", *FSDP_AXES, "context", "tensor")
STATE_AXES = (*FSDP_AXES, "context")  # over which parameters are split
TOKENS = ("dit", "mdt", "pixart", "mmdit", "flux")  # networks whose tokens a context axis splits
MINOR = 8  # at most, the smaller factor of fsdp
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


def make_mesh(data: int = -1, fsdp: int = 1, tensor: int = 1, devices: Devices = None, context: int = 1) -> Mesh:
    """A mesh over all devices; one size may be -1 and is inferred from the others.

    Devices of several slices are ordered by slice, and `data` must split over the slices: parameters are then gathered
    inside a slice, and only gradients cross between slices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = {"data": data, "fsdp": fsdp, "context": context, "tensor": tensor}
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
    slices = {getattr(device, "slice_index", 0) for device in devices}
    if sizes["data"] % len(slices):
        raise ValueError(
            f"mesh.data={sizes['data']} does not split over the {len(slices)} slices of these devices, between which "
            f"links are slow; choose a multiple of {len(slices)}, and fsdp, context and tensor inside a slice"
        )
    ordered = sorted(devices, key=lambda device: getattr(device, "slice_index", 0))
    minor = _minor(sizes["fsdp"])
    shape = (sizes["data"], sizes["fsdp"] // minor, minor, sizes["context"], sizes["tensor"])
    return Mesh(np.asarray(ordered).reshape(shape), AXES)


def config_mesh(config: ConfigDict, devices: Devices = None) -> Mesh:
    """The mesh of a config."""
    c = config.mesh
    if c.context > 1 and config.model.name not in TOKENS:
        raise ValueError(
            f"mesh.context={c.context} splits the tokens of a transformer ({', '.join(TOKENS)}), and model.name is "
            f"{config.model.name!r}; set it to 1 and raise mesh.data or mesh.fsdp"
        )
    return make_mesh(c.data, c.fsdp, c.tensor, devices, c.context)


def _minor(fsdp: int) -> int:
    """The smaller factor of fsdp: the largest power of two up to MINOR and to the square root."""
    return max(size for size in (1, 2, 4, MINOR) if fsdp % size == 0 and size * size <= fsdp)


def sizes_of(mesh: Mesh) -> dict[str, int]:
    """The sizes of a mesh as a config has them: fsdp as one."""
    return {
        "data": mesh.shape["data"],
        "fsdp": ways(mesh, FSDP_AXES),
        "context": mesh.shape["context"],
        "tensor": mesh.shape["tensor"],
    }


def _nearest(sizes: Mapping[str, int], count: int) -> dict[str, int]:
    """The mesh of `count` devices closest in ratio to the requested sizes; sizes that are not positive are free."""
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    found = [shape for shape in itertools.product(divisors, repeat=len(sizes)) if math.prod(shape) == count]

    def distance(mesh: tuple[int, ...]) -> float:
        return sum(abs(math.log(n / size)) for n, size in zip(mesh, sizes.values(), strict=True) if size > 0)

    best = min(found, key=distance)
    return dict(zip(sizes, best, strict=True))


def check_batch(batch_size: int, mesh: Mesh, parts: int = 1) -> None:
    """Check that the global batch divides over the devices that shard it, in every accumulation step."""
    shares = ways(mesh) * parts
    if batch_size % shares or batch_size < shares:
        nearest = max(shares, round(batch_size / shares) * shares)
        raise ValueError(
            f"a global batch of {batch_size} does not divide over {mesh.shape['data']} x {ways(mesh, FSDP_AXES)} "
            f"(data x fsdp) devices in {parts} accumulation step(s); the nearest batch that does is {nearest}"
        )


def spec_of(name: str, shape: tuple[int, ...], mesh: Mesh, min_size: int = 2**14) -> PartitionSpec:
    """The sharding of one array; arrays with fewer than `min_size` elements are not sharded over fsdp."""
    axes: list[str | tuple[str, ...] | None] = [None] * len(shape)
    tensor = mesh.shape["tensor"]
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
    if ways(mesh, STATE_AXES) > 1 and math.prod(shape) >= min_size:
        free = {i: shape[i] for i, axis in enumerate(axes) if axis is None}
        for i, names in _split(free, {name: mesh.shape[name] for name in STATE_AXES if mesh.shape[name] > 1}).items():
            axes[i] = names if len(names) > 1 else names[0]
    return PartitionSpec(*axes)


def _split(free: Mapping[int, int], mesh: Mapping[str, int]) -> dict[int, tuple[str, ...]]:
    """Mesh axes for the free axes of an array: the finest split, along as few and as large axes as possible."""
    best: dict[int, tuple[str, ...]] = {}
    rank: tuple = ()
    for places in itertools.product((None, *free), repeat=len(mesh)):
        found = {i: tuple(name for name, at in zip(mesh, places, strict=True) if at == i) for i in free if i in places}
        parts = {i: math.prod(mesh[name] for name in names) for i, names in found.items()}
        if all(free[i] % count == 0 for i, count in parts.items()):
            order = sorted(((free[i], i) for i in found), reverse=True)
            score = (math.prod(parts.values()), -len(found), order, [parts[i] for _, i in order])
            if not rank or score > rank:
                best, rank = found, score
    return best


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
