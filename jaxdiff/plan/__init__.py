"""The cost of training a config on hardware that is not present: memory, FLOPs, communication, time.

The trainer's own step is compiled ahead of time for the topology; `hlo` parses the program, `chips` has the hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ml_collections import ConfigDict

from jaxdiff.chips import CHIPS, Topology, topology
from jaxdiff.plan.program import Devices, Refused, analyse, devices_of, largest
from jaxdiff.plan.report import Record, advice, estimate, text

__all__ = ["CHIPS", "Topology", "advice", "blank", "compare", "make", "meshed", "text", "topology"]

MESHES = ("data", "fsdp", "context", "tensor")


def make(
    config: ConfigDict,
    machine: Topology,
    largest_batch: bool = False,
    devices: Devices | None = None,
    compiled: bool = True,
) -> Record:
    """The plan of one sharding, that of config.mesh; not `compiled`: of the state and the traced step alone."""
    devices = devices_of(machine) if devices is None else devices
    record = analyse(config, machine, devices, compiled)
    if record.get("traffic") is not None or not (machine.tpu and compiled):
        record |= estimate(record, machine)
    record["advice"] = advice(record, config, machine)
    if largest_batch:
        sizes = record["mesh"]
        unit = sizes["data"] * sizes["fsdp"] * config.optim.accum_steps

        def fits(batch: int) -> bool:
            return (batch == record["batch"] and record["fits"]) or _fits(config, batch, machine, devices)

        record["largest_batch"] = largest(fits, record["batch"], unit)
    return record


def compare(
    config: ConfigDict, machine: Topology, meshes: Sequence[str], say: Callable[[str], None] = lambda line: None
) -> Record:
    """The plans of several shardings and the fastest that fits; refused ones are listed with the reason."""
    plans: dict[str, Record] = {}
    configs = {name: meshed(config, name, machine.chips) for name in meshes}
    devices = devices_of(machine)
    for name, changed in configs.items():
        try:
            plans[name] = make(changed, machine, devices=devices)
        except Refused as error:
            plans[name] = {"fits": False, "refused": str(error)}
        say(text(plans[name], f"{machine.name}, {name}"))
    fitting = [name for name, plan in plans.items() if plan["fits"]]
    best = min(fitting, key=lambda name: (plans[name]["seconds"], plans[name]["hbm"]["peak"] or 0), default=None)
    return {"topology": machine.name, "plans": plans, "best": best}


def meshed(config: ConfigDict, name: str, chips: int) -> ConfigDict:
    """The config on a mesh: `data`, `fsdp`, `context` or `tensor` (2 by default, the rest fsdp), or sizes.

    Sizes are DATAxFSDPxTENSOR, such as 4x4x1, or DATAxFSDPxCONTEXTxTENSOR.
    """
    copy = config.copy_and_resolve_references()
    sizes: list[int]
    if name == "data":
        sizes = [chips, 1, 1, 1]
    elif name == "fsdp":
        sizes = [1, chips, 1, 1]
    elif name == "context":
        sizes = [1, -1, max(config.mesh.context, 2), 1]
    elif name == "tensor":
        sizes = [1, -1, 1, max(config.mesh.tensor, 2)]
    else:
        sizes = [int(size) if size.isdigit() else 0 for size in name.split("x")]
        if len(sizes) == 3:
            sizes.insert(2, 1)
        if len(sizes) != 4 or 0 in sizes:
            raise ValueError(
                f"a mesh to compare is {', '.join(MESHES)}, DATAxFSDPxTENSOR such as 4x4x1, or "
                f"DATAxFSDPxCONTEXTxTENSOR such as 1x64x4x1; got {name!r}"
            )
    with copy.unlocked():
        copy.mesh.data, copy.mesh.fsdp, copy.mesh.context, copy.mesh.tensor = sizes
    return copy


def blank(config: ConfigDict, shape: Sequence[int], classes: int = 0, tokens: Sequence[int] = ()) -> ConfigDict:
    """The config with blank data of that shape, for a machine without its data."""
    copy = config.copy_and_resolve_references()
    options: dict[str, object] = {"shape": tuple(shape)}
    options |= {"text": tuple(tokens)} if tokens else {"num_classes": classes}
    with copy.unlocked():
        copy.data.source, copy.data.options, copy.train.eval_every = "blank", ConfigDict(options), 0
    return copy


def _fits(config: ConfigDict, batch: int, machine: Topology, devices: Devices) -> bool:
    copy = config.copy_and_resolve_references()
    with copy.unlocked():
        copy.data.batch_size = batch
    return bool(analyse(copy, machine, devices)["fits"])
