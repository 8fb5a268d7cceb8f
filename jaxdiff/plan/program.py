"""The train step of a config, compiled ahead of time for another machine, and its compiler statistics."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding
from jax.stages import Traced, Wrapped
from ml_collections import ConfigDict

from jaxdiff import flops
from jaxdiff.chips import Topology
from jaxdiff.methods import TrainState, exported
from jaxdiff.placement import BATCH
from jaxdiff.plan import gpus, hlo
from jaxdiff.plan.report import Record
from jaxdiff.training import Run, prepare, state
from jaxdiff.training.sharding import bytes_per_device, sizes_of
from jaxdiff.trees import Params, size_of

# libtpu without a TPU: allow several processes, no metadata queries, no warnings about missing hardware
ALONE = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",  # arbitrary: the topology is set explicitly
}


Devices: TypeAlias = Sequence[jax.Device]
Step: TypeAlias = tuple[Any, ...]  # the arguments of the trainer's step: shapes and shardings


class Refused(ValueError):
    """A config that is invalid on these devices; nothing was compiled."""


def devices_of(machine: Topology) -> Devices:
    """Devices to build a mesh from, as the compiler describes them; without a GPU compiler, simulated ones."""
    if not machine.tpu and gpus.installed():
        return gpus.devices(machine)
    if not machine.tpu:
        with contextlib.suppress(RuntimeError):  # already initialised, perhaps with enough devices
            jax.config.update("jax_num_cpu_devices", machine.chips)
        return jax.devices("cpu")[: machine.chips]
    if importlib.util.find_spec("libtpu") is None:
        raise ImportError(
            "planning for a TPU needs its compiler, which needs no TPU: pip install libtpu, or jaxdiff[plan] (Linux on "
            "x86-64)"
        )
    for name, value in ALONE.items():
        os.environ.setdefault(name, value)
    options: dict[str, str | int] = {"chip_config_name": "megacore"} if machine.kind in ("v4", "v5p") else {}
    if machine.slices > 1:
        options["num_slices"] = machine.slices
    name = machine.name.rpartition("*")[2]
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices
    except RuntimeError as error:
        raise ValueError(f"libtpu has no topology {machine.name!r}: {str(error).splitlines()[0]}") from None


def arguments(run: Run, mesh: Mesh) -> Step:
    """Shapes and shardings of the arguments of the trainer's step."""
    declared = state.declare(run, mesh)
    size, place = run.config.data.batch_size, NamedSharding(mesh, BATCH)
    example = state.example_batch(run, mesh)
    batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct((size, *a.shape[1:]), a.dtype, sharding=place), example)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    return declared, state.Guard(number, number), batch, key, number


def step_of(run: Run, mesh: Mesh, given: Step) -> Wrapped:
    """The trainer's step for these arguments."""
    return state.guarded_step(run, mesh, state.shardings_of(given[0]))


def exported_shapes(declared: TrainState) -> Params:
    """Shapes of the parameters that the run will export."""
    return jax.eval_shape(exported, declared)


def held(declared: TrainState) -> dict[str, int]:
    """Bytes per device of each part of the state."""
    found = {}
    for group in ("params", "opt_state", "averages", "frozen"):
        for name, tree in getattr(declared, group).items():
            found[f"{group}/{name}"] = bytes_per_device(tree)
    return found


def analyse(config: ConfigDict, machine: Topology, devices: Devices, compiled: bool = True) -> Record:
    """The plan of one sharding; invalid configs are refused before anything is compiled."""
    try:
        run, mesh = prepare(config, devices)
        given = arguments(run, mesh)
        traced = step_of(run, mesh, given).trace(*given)
    except ValueError as error:
        raise Refused(str(error)) from error
    executed = flops.total(traced.jaxpr.jaxpr)
    parts = held(given[0])
    away = tuple(name for name in parts if config.teacher.offload and name.startswith("frozen/"))
    record = {
        "mesh": sizes_of(mesh),
        "batch": config.data.batch_size,
        "parameters": size_of(exported_shapes(given[0])),
        "trained": size_of(given[0].params["student"]),
        "state": {name: size for name, size in parts.items() if name not in away},
        "host": {name: size for name, size in parts.items() if name in away},
        "flops": {"model": _model_flops(config, devices, executed), "executed": executed},
    }
    if not compiled:
        return record | _state_alone(given, machine)
    step = step_of(run, mesh, given)
    if not machine.tpu and devices[0].platform == "cpu":
        return record | _export_cuda(step, given, machine)
    return record | _compile(traced, step, given, machine)


def _model_flops(config: ConfigDict, devices: Devices, executed: int) -> int:
    """FLOPs of the model: those of the same step without rematerialisation."""
    if not config.model.remat:
        return executed
    plain = config.copy_and_resolve_references()
    with plain.unlocked():
        plain.model.remat = ""
    run, mesh = prepare(plain, devices)
    given = arguments(run, mesh)
    return flops.total(step_of(run, mesh, given).trace(*given).jaxpr.jaxpr)


def _compile(traced: Traced, step: Wrapped, given: Step, machine: Topology) -> Record:
    start = time.monotonic()
    try:
        with uncached():
            program = traced.lower().compile(None if machine.tpu else gpus.OPTIONS)
    except jax.errors.JaxRuntimeError as error:
        if not machine.tpu:  # without a GPU its compiler fails on some programs
            return _export_cuda(step, given, machine) | {"refusal": str(error).splitlines()[0][:300]}
        return _too_large(error, machine) | {"compile_seconds": time.monotonic() - start}
    seconds = time.monotonic() - start
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
        "kernels": text.kernels(),
        "transposes": text.transposes(),
        "traffic": text.traffic(),
        "compiler": {"flops": counted.get("flops"), "bytes": counted.get("bytes accessed")},
        "compile_seconds": seconds,
    }


def _peak(memory: Any) -> int:
    """Peak memory of the program; the GPU compiler does not report it, then the sum of all buffers."""
    parts = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return getattr(memory, "peak_memory_in_bytes", 0) or parts - memory.alias_size_in_bytes


def _too_large(error: Exception, machine: Topology) -> Record:
    """The compiler's refusal for want of HBM as a record; other errors are raised, such as of a kernel's own memory."""
    message = str(error)
    if "RESOURCE_EXHAUSTED" not in message or "vmem" in message.lower():
        raise error
    sizes = re.search(r"\((\d+\.?\d*)G\) exceeds available HBM \((\d+\.?\d*)G\)", message)
    hbm = {"peak": None, "limit": int(machine.chip.hbm)}
    if sizes:
        needed, limit = (int(float(size) * 2**30) for size in sizes.groups())
        hbm = {"peak": needed, "limit": limit}
    return {"fits": False, "hbm": hbm, "refusal": message.splitlines()[0]}


def _export_cuda(step: Wrapped, given: Step, machine: Topology) -> Record:
    """Lower for CUDA as a check; without a GPU compiler only the memory of the state is known."""
    start = time.monotonic()
    exported = jax.export.export(step, platforms=["cuda"])(*given)
    return _state_alone(given, machine) | {
        "compiler": {"lowered_for": list(exported.platforms)},
        "compile_seconds": time.monotonic() - start,
    }


def _state_alone(given: Step, machine: Topology) -> Record:
    """What is known without a compiled program: the memory of state and batch."""
    state = bytes_per_device(given[0]) + bytes_per_device(given[2])
    return {
        "fits": state <= machine.chip.hbm,
        "hbm": {"arguments": state, "peak": None, "limit": int(machine.chip.hbm)},
        "collectives": {},
        "traffic": None,
    }


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """Disable the compilation cache, whose programs cannot be loaded without their device."""
    before = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def largest(fits: Callable[[int], bool], start: int, unit: int) -> int:
    """The largest multiple of `unit` that fits, to within 1/16; 0 if none does."""
    low, high = 0, max(1, start // unit)
    while fits(high * unit):
        low, high = high, 2 * high
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * unit) else (low, middle)
    return low * unit
