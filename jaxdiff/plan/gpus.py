"""GPU targets for compiling without a GPU.

The CUDA plugin of JAX (`pip install jax-cuda12-plugin jax-cuda12-pjrt`) compiles without a driver and without CUDA's
libraries. It then selects algorithms without autotuning: real programs may be faster, and convolutions may need
workspace memory.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import jax
from jax.experimental import topologies

from jaxdiff.chips import Topology

# Triton's matrix products need autotuned tile sizes; cuBLAS is used instead
OPTIONS = {"xla_gpu_enable_triton_gemm": False}
PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
# of one multiprocessor and of the chip, from NVIDIA's tuning guides; memory and its speed are those of chips.CHIPS
SAME = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "threads_per_core_limit": 2048,
    "shared_memory_per_block": 49152,
    "registers_per_core_limit": 65536,
    "registers_per_block_limit": 65536,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
}
DEVICES: dict[str, dict[str, int | float | str]] = {
    "a100": {
        "core_count": 108,
        "fpus_per_core": 64,
        "shared_memory_per_core": 167936,
        "shared_memory_per_block_optin": 166912,
        "l2_cache_size": 40 * 2**20,
        "clock_rate_ghz": 1.41,
        "cuda_compute_capability": "{ major: 8 }",
    },
    "h100": {
        "core_count": 132,
        "fpus_per_core": 128,
        "shared_memory_per_core": 233472,
        "shared_memory_per_block_optin": 232448,
        "l2_cache_size": 50 * 2**20,
        "clock_rate_ghz": 1.98,
        "cuda_compute_capability": "{ major: 9 }",
    },
}


def installed() -> bool:
    """Whether the GPU compiler is installed."""
    if importlib.util.find_spec("jax_plugins") is None:
        return False
    return any(importlib.util.find_spec(name) is not None for name in PLUGINS)


def target(machine: Topology) -> str:
    """The chip in the text form of XLA's GPU targets."""
    memory = {"memory_bandwidth": int(machine.chip.bandwidth), "device_memory_size": int(machine.chip.hbm)}
    known = {**SAME, **DEVICES[machine.kind], **memory}
    fields = " ".join(f"{name}: {value}" for name, value in known.items()).replace(": {", " {")
    dnn = "dnn_version_info { major: 9 minor: 8 }"
    return f'gpu_device_info {{ {fields} }} platform_name: "CUDA" {dnn} device_description_str: "{machine.kind}"'


def devices(machine: Topology) -> Sequence[jax.Device]:
    """Devices to build a mesh from; `h100:4x8` is four hosts with eight GPUs each."""
    sides = machine.name.partition(":")[2].split("x")
    shape = "x".join(["1"] * (3 - len(sides)) + sides)
    return topologies.get_topology_desc(
        platform="cuda", topology_name=machine.kind, target_config=target(machine), topology=shape
    ).devices
