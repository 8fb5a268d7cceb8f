"""The train step of a config, compiled for a machine that is not here, and what the program says about itself."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding
from ml_collections import ConfigDict

from jaxdiff.features import costs
from jaxdiff.plan import gpus, hlo
from jaxdiff.plan.chips import Topology
from jaxdiff.training import trainer
from jaxdiff.training.build import Job, build
from jaxdiff.training.sharding import BATCH, bytes_per_device, make_mesh, state_shardings, with_shardings

PARTS = ("params", "opt_state", "ema", "target", "score", "score_opt_state", "frozen")
# libtpu without a TPU: not to be the only process, nor to ask the cloud which machine this is, nor complain it is none
ALONE = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",  # any will do: the topology is named where it is made
}


class Refused(ValueError):
    """A config that cannot be on these devices; nothing was compiled."""


def devices_of(machine: Topology) -> Any:
    """Devices to build a mesh from, as their compiler knows them; for GPUs without it as many simulated ones."""
    if not machine.tpu and gpus.installed():
        return gpus.devices(machine)
    if not machine.tpu:
        with contextlib.suppress(RuntimeError):  # devices are there already, perhaps enough of them
            jax.config.update("jax_num_cpu_devices", machine.chips)
        return jax.devices("cpu")[: machine.chips]
    if importlib.util.find_spec("libtpu") is None:
        raise ImportError(
            "planning for a TPU needs its compiler, which needs no TPU: pip install libtpu (Linux on x86-64)"
        )
    for name, value in ALONE.items():
        os.environ.setdefault(name, value)
    whole = {"chip_config_name": "megacore"} if machine.kind in ("v4", "v5p") else {}
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=machine.name, **whole).devices
    except RuntimeError as error:
        raise ValueError(f"libtpu knows no topology {machine.name!r}: {str(error).splitlines()[0]}") from None


def arguments(job: Job) -> tuple[tuple[Any, ...], Any]:
    """Shapes and shardings of what the trainer hands to its step, and the shardings of the state."""
    declared, shardings = trainer.declare(job)
    size, place = job.config.data.batch_size, NamedSharding(job.mesh, BATCH)
    example = trainer.example_batch(job)
    batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct((size, *a.shape[1:]), a.dtype, sharding=place), example)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    return (declared, trainer.Guard(number, number), batch, key, number), shardings


def analyse(config: ConfigDict, machine: Topology, devices: Any) -> dict[str, Any]:
    """Everything a plan says about one sharding; what cannot be is refused before anything is compiled."""
    try:
        job = build(config, devices)
        given, shardings = arguments(job)
        traced = trainer.guarded_step(job, shardings).trace(*given)
    except ValueError as error:
        raise Refused(str(error)) from error
    executed = costs.total(traced.jaxpr.jaxpr)
    held = {name: bytes_per_device(getattr(given[0], name)) for name in PARTS if getattr(given[0], name, None)}
    away = ("frozen",) if config.teacher.offload else ()
    record = {
        "mesh": dict(job.mesh.shape),
        "batch": config.data.batch_size,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(getattr(given[0], "params", given[0]))),
        "state": {name: size for name, size in held.items() if name not in away},
        "host": {name: size for name, size in held.items() if name in away},
        "flops": {"model": _model_flops(config, devices, executed), "executed": executed},
    }
    record["finer"] = finer(job, given[0])
    compiled = _export_cuda if not machine.tpu and devices[0].platform == "cpu" else _compile
    return record | compiled(traced, trainer.guarded_step(job, shardings), given, machine)


def finer(job: Job, state: Any) -> dict[str, int] | None:
    """The smaller size of fsdp that leaves less of the parameters on a chip than this one, if there is one.

    An array is split along one axis, which that size must divide: 1152 is no multiple of 256, but of 128.
    """
    shape, devices = job.mesh.shape, list(job.mesh.devices.flat)
    ways = shape["data"] * shape["fsdp"]

    def held(fsdp: int) -> int:
        mesh = make_mesh(ways // fsdp, fsdp, shape["tensor"], devices)
        shardings = state_shardings({"params": state.params}, mesh, job.config.mesh.min_size)
        return bytes_per_device(with_shardings(state.params, shardings["params"]))

    sizes = {fsdp: held(fsdp) for fsdp in range(2, shape["fsdp"] + 1) if ways % fsdp == 0}
    best = min(sizes, key=lambda fsdp: (sizes[fsdp], fsdp), default=shape["fsdp"])
    if best == shape["fsdp"]:
        return None
    return {"data": ways // best, "fsdp": best, "params": sizes[best]}


def _model_flops(config: ConfigDict, devices: Any, executed: int) -> int:
    """Multiply-adds that the mathematics asks for: those of the same step without recomputation."""
    if not config.model.remat and not config.model.fields.get("remat"):
        return executed
    plain = config.copy_and_resolve_references()
    with plain.unlocked():
        plain.model.remat = ""
        if "remat" in plain.model.fields:
            del plain.model.fields.remat
    job = build(plain, devices)
    given, shardings = arguments(job)
    return costs.total(trainer.guarded_step(job, shardings).trace(*given).jaxpr.jaxpr)


def _compile(traced: Any, step: Any, given: Any, machine: Topology) -> dict[str, Any]:
    begun = time.monotonic()
    try:
        with uncached():
            program = traced.lower().compile(None if machine.tpu else gpus.OPTIONS)
    except jax.errors.JaxRuntimeError as error:
        if not machine.tpu:  # without a GPU to try things on, its compiler fails on some programs
            return _export_cuda(traced, step, given, machine) | {"refusal": str(error).splitlines()[0][:300]}
        return _too_large(error, machine) | {"compile_seconds": time.monotonic() - begun}
    seconds = time.monotonic() - begun
    memory, counted = program.memory_analysis(), program.cost_analysis() or {}
    text = hlo.Program(program.as_text(), machine.chips)
    hbm = {
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "code": memory.generated_code_size_in_bytes,
        "host": memory.host_argument_size_in_bytes,
        "peak": _peak(memory),
        "limit": int(machine.chip.hbm),
    }
    return {
        "fits": hbm["peak"] <= hbm["limit"],
        "hbm": hbm,
        "collectives": hlo.by_kind(text.collectives()),
        "traffic": text.traffic(),
        "compiler": {"flops": counted.get("flops"), "bytes": counted.get("bytes accessed")},
        "compile_seconds": seconds,
    }


def _peak(memory: Any) -> int:
    """The most memory the program holds at once; the compiler for GPUs does not tell, then all of it together."""
    parts = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return getattr(memory, "peak_memory_in_bytes", 0) or parts - memory.alias_size_in_bytes


def _too_large(error: Exception, machine: Topology) -> dict[str, Any]:
    """The compiler's refusal as a record; any other error is passed on."""
    message = str(error)
    if "RESOURCE_EXHAUSTED" not in message:
        raise error
    sizes = re.search(r"\((\d+\.?\d*)G\) exceeds available HBM \((\d+\.?\d*)G\)", message)
    needed, limit = (int(float(size) * 2**30) for size in sizes.groups()) if sizes else (None, int(machine.chip.hbm))
    hbm = {"peak": needed, "limit": limit}
    return {"fits": False, "hbm": hbm, "refusal": message.splitlines()[0]}


def _export_cuda(_: Any, step: Any, given: Any, machine: Topology) -> dict[str, Any]:
    """Lowered for CUDA, which proves that it lowers; without a GPU's compiler only the state's memory is known."""
    begun = time.monotonic()
    exported = jax.export.export(step, platforms=["cuda"])(*given)
    state = bytes_per_device(given[0]) + bytes_per_device(given[2])
    return {
        "fits": state <= machine.chip.hbm,
        "hbm": {"arguments": state, "peak": None, "limit": int(machine.chip.hbm)},
        "collectives": {},
        "traffic": None,
        "compiler": {"lowered_for": list(exported.platforms)},
        "compile_seconds": time.monotonic() - begun,
    }


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """No compilation cache: what it holds for a device cannot be loaded where that device is not."""
    before = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def largest(fits: Callable[[int], bool], start: int, unit: int) -> int:
    """The largest multiple of `unit` that fits, to one part in sixteen; 0 if not even one does."""
    low, high = 0, max(1, start // unit)
    while fits(high * unit):
        low, high = high, 2 * high
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * unit) else (low, middle)
    return low * unit
