"""Plans as text: the roofline estimate, advice if the program does not fit, the printed lines."""

from __future__ import annotations

from typing import Any, TypeAlias

from ml_collections import ConfigDict

from jaxdiff.chips import GIB, Topology

Record: TypeAlias = dict[str, Any]  # a plan, as JSON stores it


def estimate(record: Record, machine: Topology) -> Record:
    """The minimum seconds per step, what bounds it, and the resulting MFU."""
    sent = sum(row["sent"] for row in record["collectives"].values())
    times = machine.chip.times(record["flops"]["executed"] / machine.chips, record["traffic"] or 0, sent)
    bound, seconds = max(times.items(), key=lambda item: item[1])
    mfu = record["flops"]["model"] / machine.chips / machine.chip.flops / seconds
    return {"times": times, "bound": bound, "seconds": seconds, "mfu": mfu}


def advice(record: Record, config: ConfigDict, machine: Topology) -> list[str]:
    """What to change if the program does not fit, most effective first."""
    if record["fits"]:
        return []
    lines, state, limit = [], sum(record["state"].values()), record["hbm"]["limit"]
    if state > limit / 3 and record["mesh"]["fsdp"] * record["mesh"]["context"] < machine.chips:
        lines.append(
            f"the state alone takes {state / GIB:.2f} GiB per chip; shard it over all chips: "
            "--config.mesh.data=1 --config.mesh.fsdp=-1 --config.mesh.tensor=1"
        )
    if "frozen/teacher" in record["state"] and not config.lora.rank:
        lines.append("train low-rank updates of the teacher (docs/lora.md): --config.lora.rank=16")
    if config.model.remat != "full" and config.model.name != "mlp":
        lines.append("keep fewer activations: --config.model.remat=full")
    frozen = sum(size for name, size in record["state"].items() if name.startswith("frozen/"))
    if frozen > limit / 20:
        lines.append("keep the teacher on the host between uses: --config.teacher.offload=True")
    unit = record["mesh"]["data"] * record["mesh"]["fsdp"]
    parts = 2 * config.optim.accum_steps
    if record["batch"] % (unit * parts) == 0:
        lines.append(f"accumulate gradients over more steps: --config.optim.accum_steps={parts}")
    smaller = record["batch"] // 2 // unit * unit
    if smaller:
        lines.append(f"use a smaller batch: --config.data.batch_size={smaller}")
    return lines or ["use more chips, or chips with more memory"]


def text(record: Record, title: str) -> str:
    """The plan of one sharding as text."""
    if "refused" in record:
        return f"{title}: refused before compiling\n  {record['refused']}"
    mesh = " x ".join(f"{name} {size}" for name, size in record["mesh"].items())
    held = ", ".join(f"{name} {size / GIB:.3f}" for name, size in record["state"].items())
    lines = [
        f"{title}: mesh {mesh}, batch {record['batch']}, {record['parameters']:,} parameters{_trained(record)}",
        f"  state per chip, GiB: {held}{_away(record)}",
        f"  HBM per chip: {_memory(record)}",
        f"  FLOPs per step: {record['flops']['model']:.4g} of the model, {record['flops']['executed']:.4g} with "
        f"recomputation (counted in the traced step, including loops); {_compiler(record)}",
    ]
    if "refusal" in record:
        lines.append(f"  refused: {record['refusal']}")
    lines += [f"  {line}" for line in _communication(record)]
    if kernels := record.get("kernels"):
        runs = ", ".join(f"{target} {count}" for target, count in sorted(kernels.items()))
        moved = record["transposes"]
        lines.append(
            f"  custom kernels, runs per step: {runs}; transpositions on their own: {moved['per_step']} per step, "
            f"{moved['bytes'] / GIB:.3f} GiB"
        )
    if "seconds" in record:
        lines.append(f"  {_time(record)}")
    if "largest_batch" in record:
        lines.append(f"  largest batch that fits: {record['largest_batch']}")
    lines += [f"  to make it fit: {line}" for line in record.get("advice", [])]
    compiled = f"compiled in {record['compile_seconds']:.0f} s" if "compile_seconds" in record else "not compiled"
    return "\n".join([*lines, f"  {compiled}"])


def _trained(record: Record) -> str:
    trained = record.get("trained", record["parameters"])  # absent in stored plans of earlier versions
    return f", of which a low-rank update of {trained:,} is trained" if trained < record["parameters"] else ""


def _away(record: Record) -> str:
    parts = ", ".join(f"{name} {size / GIB:.3f}" for name, size in record.get("host", {}).items())
    return f"; in host memory: {parts}" if parts else ""


def _memory(record: Record) -> str:
    hbm, limit = record["hbm"], record["hbm"]["limit"] / GIB
    if hbm["peak"] is None:
        return f"state and batch {hbm.get('arguments', 0) / GIB:.2f} of {limit:.2f} GiB; activations unknown"
    parts = [
        f"{name} {hbm[name] / GIB:.2f}" for name in ("arguments", "temporaries", "outputs", "aliased") if name in hbm
    ]
    verdict = "fits" if record["fits"] else "DOES NOT FIT"
    details = f" ({', '.join(parts)})" if parts else ""
    return f"peak {hbm['peak'] / GIB:.2f} of {limit:.2f} GiB, {verdict}{details}"


def _compiler(record: Record) -> str:
    counted = record.get("compiler", {})
    if counted.get("flops") is None:
        return "not counted by the compiler"
    return f"the compiler counts {counted['flops']:.4g} per chip, with loop bodies counted once"


def _communication(record: Record) -> list[str]:
    return [
        f"{kind}: {row['in_text']} in the program, {row['per_step']} per step, results {row['bytes'] / GIB:.3f} GiB, "
        f"{row['sent'] / GIB:.3f} GiB sent per chip"
        for kind, row in sorted(record.get("collectives", {}).items())
    ]


def _time(record: Record) -> str:
    times = ", ".join(f"{name} {1e3 * seconds:.1f}" for name, seconds in record["times"].items())
    return (
        f"a step takes at least {1e3 * record['seconds']:.1f} ms, bound by {record['bound']} (ms each: {times}); "
        f"MFU at most {100 * record['mfu']:.0f} %"
    )
