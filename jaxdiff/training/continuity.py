"""A run that is resumed is compared with the run that began: config, data, processes and versions.

history.json holds what the run began with, what it has now, and every change in between with its step. A change either
leaves the result as it is (how long, how often, where), or changes the order of summation and so the last bits (mesh,
processes, versions), or alters the result. The first two kinds are taken and logged; the third is refused unless it is
allowed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

import jaxdiff
import jaxdiff.configs.default as default
from jaxdiff.data import DataSpec, spec
from jaxdiff.files import read_json, write_json
from jaxdiff.methods import METHODS
from jaxdiff.placement import ways
from jaxdiff.training import export
from jaxdiff.training.build import Run

FILE = "history.json"
FORMAT = 1
# what training does not read, or reads only where it starts afresh
HARMLESS = (
    *("train.steps", "train.log_every", "train.sample_every", "train.eval_every", "train.save_every"),
    *("train.init_from", "train.init_kind", "train.on_nonfinite", "teacher.path", "teacher.offload"),
    *("checkpoint.keep", "checkpoint.metric", "ema.snapshot_every", "data.workers", "compile_cache"),
)
HARMLESS_SECTIONS = ("eval", "autoencoder", "curriculum")
ROUNDING = ("processes", "devices that split the batch", "jaxdiff version", "jax version", "model.remat")
DATA = "data fingerprint"
Record: TypeAlias = dict[str, Any]  # of JSON values, by name


class Change(NamedTuple):
    """A value that differs from that of the run so far."""

    name: str
    old: object
    new: object
    effect: str  # "none", "rounding" or "result"

    def __str__(self) -> str:
        return f"{self.name}: {_shown(self.old)} -> {_shown(self.new)}"


class ConfigChanged(ValueError):
    """A run would be resumed with something that alters its result."""


def record_of(run: Run, mesh: Mesh) -> Record:
    """What a run is made of, as JSON values by name."""
    return {
        **flat(run.config),
        **_data(run.data),
        "processes": jax.process_count(),
        "devices that split the batch": ways(mesh),
        "jaxdiff version": jaxdiff.__version__,
        "jax version": jax.__version__,
    }


def flat(config: ConfigDict) -> Record:
    """The fields of a config by their paths."""
    plain = json.loads(json.dumps(config.to_dict(), default=export._plain))
    found: Record = {}

    def add(prefix: str, value: object) -> None:
        if isinstance(value, dict):
            for name, entry in value.items():
                add(f"{prefix}.{name}" if prefix else name, entry)
        else:
            found[prefix] = value

    add("", plain)
    return found


def _data(data: DataSpec) -> Record:
    return {DATA: f"{data.fingerprint[:16]} of {data.size:,} examples"}


def compare(old: Record, new: Record) -> list[Change]:
    """What differs; a field that the old record does not have is compared with its default."""
    filled = {**flat(default.get_config()), **old}
    for name in set(new) - set(old) - set(flat(default.get_config())):
        if name in (DATA, *ROUNDING):
            filled[name] = new[name]  # not recorded: nothing to compare
    names = [name for name in new if filled.get(name) != new[name]]
    names += [name for name in old if name not in new and old[name] is not None]
    return [Change(name, filled.get(name), new.get(name), effect(name, old, new)) for name in names]


def effect(name: str, old: Record, new: Record) -> str:
    """What a change of this field does to a run that is resumed."""
    section, _, field = name.partition(".")
    method = str(new.get("method.name", ""))
    if name in HARMLESS or section in HARMLESS_SECTIONS:
        return "none"
    if section in METHODS and section not in ("diffusion", method):
        return "none"  # options of a method that is not used
    if section == "sample":
        entry = METHODS.get(method)
        taught = entry is None or field in entry.fixed or (method != "diffusion" and field.startswith("control"))
        return "result" if taught else "none"
    if name == "data.options.path" and old.get(DATA) == new.get(DATA):
        return "none"  # the same data elsewhere
    if name == "devices that split the batch" and _grouped_by_device(new):
        return "result"
    return "rounding" if name in ROUNDING or section == "mesh" else "result"


def _grouped_by_device(record: Record) -> bool:
    """Whether noise is assigned within the share of a device."""
    return record.get("noise.assignment") != "none" and not record.get("noise.assignment_options.groups")


def check(workdir: Path, run: Run, mesh: Mesh, step: int, allow: bool = False) -> list[Change]:
    """What has changed since the run was last trained; an error if it alters the result and is not allowed."""
    old = _last(workdir)
    changes = compare(old, record_of(run, mesh)) if old is not None else []
    altering = [change for change in changes if change.effect == "result"]
    if altering and not allow:
        shown = "\n".join(f"  {change}" for change in altering)
        raise ConfigChanged(
            f"the run in {workdir} is at step {step} and began otherwise; these changes would alter its result:\n"
            f"{shown}\nResume it as it is (jaxdiff train --workdir={workdir}), choose another --workdir for the new "
            "config, or pass --allow_config_change to continue with the new values"
        )
    return changes


def write(workdir: Path, run: Run, mesh: Mesh, step: int, changes: Iterable[Change]) -> None:
    """Record what a run begins with (at step 0), or what changed where it is resumed; atomically."""
    now = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "step": step}
    record = record_of(run, mesh)
    changed = {change.name: [change.old, change.new] for change in changes}
    before = _read(workdir) if step else None
    if before is None:  # of a run of an earlier version only the last config is known
        began = {**record, **{name: old for name, (old, _) in changed.items()}}
        before = {"format": FORMAT, "began": {**now, **began}, "changes": []}
    if changed:
        before["changes"].append({**now, "changed": changed})
    write_json(Path(workdir) / FILE, {**before, "now": record})


def describe(changes: Iterable[Change], step: int) -> list[str]:
    """Log lines about changes that are taken."""
    texts = {
        "none": "changed since step {step}, without effect on the result so far",
        "rounding": "changed since step {step}, results now agree to rounding and not to the bit",
        "result": "changed since step {step} by --allow_config_change, the result is a mixture",
    }
    lines = []
    for kind, text in texts.items():
        found = [str(change) for change in changes if change.effect == kind]
        if found:
            lines.append(f"{text.format(step=step)}: {'; '.join(found)}")
    return lines


def _last(workdir: Path) -> Record | None:
    """What the run was last trained with: from its history, or for earlier versions from config.json and data.json."""
    history = _read(workdir)
    if history is not None:
        return history["now"]
    if not (Path(workdir) / "config.json").is_file():
        return None
    data = spec.read(Path(workdir))
    return {**flat(export.read_config(Path(workdir))), **(_data(data) if data is not None else {})}


def _read(workdir: Path) -> dict[str, Any] | None:
    path = Path(workdir) / FILE
    if not path.is_file():
        return None
    try:
        history = read_json(path, "the history of a run")
        if history["format"] == FORMAT and isinstance(history["now"], dict) and isinstance(history["changes"], list):
            return history
        problem = f"it has format {history['format']}, this version of jaxdiff reads {FORMAT}"
    except (ValueError, TypeError, KeyError, OSError) as error:
        problem = f"{type(error).__name__}: {error}"
    raise ValueError(
        f"{path} cannot be read ({problem}), so it is unknown whether the config is still that of the run; move the "
        "file away to compare with config.json instead"
    )


def _shown(value: object) -> str:
    text = "unset" if value is None else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
