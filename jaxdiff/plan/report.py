"""A plan in words: the roofline estimate, what to change when it does not fit, and the lines that are printed."""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from jaxdiff.plan.chips import GIB, Topology


def estimate(record: dict[str, Any], machine: Topology) -> dict[str, Any]:
    """The least seconds a step can take, what bounds it, and the MFU that would be."""
    sent = sum(row["sent"] for row in record["collectives"].values())
    times = machine.chip.times(record["flops"]["executed"] / machine.chips, record["traffic"] or 0, sent)
    bound, seconds = max(times.items(), key=lambda item: item[1])
    mfu = record["flops"]["model"] / machine.chips / machine.chip.flops / seconds
    return {"times": times, "bound": bound, "seconds": seconds, "mfu": mfu}


def advice(record: dict[str, Any], config: ConfigDict, machine: Topology) -> list[str]:
    """What to change, dearest first, when the program does not fit."""
    if record["fits"]:
        return []
    lines, state, limit = [], sum(record["state"].values()), record["hbm"]["limit"]
    if state > limit / 3 and record["mesh"]["fsdp"] < machine.chips:
        lines.append(
            f"the state alone takes {state / GIB:.2f} GiB of each chip; split it over all of them: "
            "--config.mesh.data=1 --config.mesh.fsdp=-1 --config.mesh.tensor=1"
        )
    if config.model.remat != "full" and not config.model.fields.get("remat") and config.model.name != "mlp":
        lines.append("keep fewer activations: --config.model.remat=full")
    if record["state"].get("frozen", 0) > limit / 20:
        lines.append("keep the teacher on the host between uses: --config.teacher.offload=True")
    unit = record["mesh"]["data"] * record["mesh"]["fsdp"]
    parts = 2 * config.optim.accumulate
    if record["batch"] % (unit * parts) == 0:
        lines.append(f"run the batch in more slices: --config.optim.accumulate={parts}")
    smaller = record["batch"] // 2 // unit * unit
    if smaller:
        lines.append(f"take a smaller batch: --config.data.batch_size={smaller}")
    return lines or ["use more chips, or chips with more memory"]


def text(record: dict[str, Any], title: str) -> str:
    """The plan of one sharding, a paragraph for people."""
    if "refused" in record:
        return f"{title}: refused before compiling\n  {record['refused']}"
    mesh = " x ".join(f"{name} {size}" for name, size in record["mesh"].items())
    held = ", ".join(f"{name} {size / GIB:.3f}" for name, size in record["state"].items())
    lines = [
        f"{title}: mesh {mesh}, batch {record['batch']}, {record['parameters']:,} parameters",
        f"  state per chip, GiB: {held}{_away(record)}",
        f"  HBM per chip: {_memory(record)}",
        f"  FLOPs of a step: {record['flops']['model']:.4g} of the model, {record['flops']['executed']:.4g} with "
        f"recomputation (counted in the traced step, loops included); {_compiler(record)}",
    ]
    if finer := record.get("finer"):
        lines.append(
            f"  not every array divides by fsdp {record['mesh']['fsdp']}: with --config.mesh.data={finer['data']} "
            f"--config.mesh.fsdp={finer['fsdp']} params would take {finer['params'] / GIB:.3f} GiB"
        )
    lines += [f"  refused: {record['refusal']}"] if "refusal" in record else []
    lines += [f"  {line}" for line in _communication(record)]
    lines += [f"  {_time(record)}"] if "seconds" in record else []
    lines += [f"  largest batch that fits: {record['largest_batch']}"] if "largest_batch" in record else []
    lines += [f"  to make it fit: {line}" for line in record.get("advice", [])]
    return "\n".join([*lines, f"  took {record['compile_seconds']:.0f} s to compile"])


def _away(record: dict[str, Any]) -> str:
    parts = ", ".join(f"{name} {size / GIB:.3f}" for name, size in record.get("host", {}).items())
    return f"; in the host's memory for it: {parts}" if parts else ""


def _memory(record: dict[str, Any]) -> str:
    hbm, limit = record["hbm"], record["hbm"]["limit"] / GIB
    if hbm["peak"] is None:
        return f"state and batch {hbm.get('arguments', 0) / GIB:.2f} of {limit:.2f} GiB; activations are not known"
    parts = [
        f"{name} {hbm[name] / GIB:.2f}" for name in ("arguments", "temporaries", "outputs", "aliased") if name in hbm
    ]
    verdict = "fits" if record["fits"] else "DOES NOT FIT"
    return f"peak {hbm['peak'] / GIB:.2f} of {limit:.2f} GiB, {verdict}" + (f" ({', '.join(parts)})" if parts else "")


def _compiler(record: dict[str, Any]) -> str:
    counted = record.get("compiler", {})
    if counted.get("flops") is None:
        return "the compiler counted none"
    return f"the compiler counts {counted['flops']:.4g} per chip, a loop's body once"


def _communication(record: dict[str, Any]) -> list[str]:
    return [
        f"{kind}: {row['in_text']} in the program, {row['per_step']} a step, results {row['bytes'] / GIB:.3f} GiB, "
        f"{row['sent'] / GIB:.3f} GiB sent by a chip"
        for kind, row in sorted(record.get("collectives", {}).items())
    ]


def _time(record: dict[str, Any]) -> str:
    times = ", ".join(f"{name} {1e3 * seconds:.1f}" for name, seconds in record["times"].items())
    return (
        f"a step takes at least {1e3 * record['seconds']:.1f} ms, bound by {record['bound']} (ms alone: {times}); "
        f"MFU at most {100 * record['mfu']:.0f} %"
    )
