"""Workdir formats: reads what earlier versions wrote.

1   no format number in config.json; parameters as ema/..., alongside a step; a training state with other names
2   "format": 2; parameters under their own names; TrainState
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxdiff.methods import TrainState
from jaxdiff.trees import Tree

FORMAT = 2
# fields of format 1 and their current names
RENAMED: dict[str, str] = {
    "cond.drop": "diffusion.cond_dropout",
    "cond.control_drop": "diffusion.control_dropout",
    "noise.weight": "diffusion.weight",
    "noise.levels": "noise.sigma_sampler",
    "emd.levels": "emd.sigma_sampler",
    "emd.level_options": "emd.sigma_options",
    "optim.accumulate": "optim.accum_steps",
    "sample.steps": "sample.timestamps",
    "sample.to_zero": "sample.final_denoise",
    "model.fields.multipliers": "model.fields.channel_mult",
    "model.fields.semantic": "model.fields.label_conditioning",
}
METHOD_NAMES = {"denoise": "diffusion"}


def current(record: dict[str, Any], path: Path) -> dict[str, Any]:
    """A config.json of any known format, converted to the current one, without the format number."""
    found = record.pop("format", 1)
    if found == FORMAT:
        return record
    if found != 1:
        raise ValueError(
            f"{path} has format {found}, this version of jaxdiff reads formats 1 and {FORMAT}; upgrade jaxdiff"
        )
    method = record["method"]["name"]
    method = record["method"]["name"] = METHOD_NAMES.get(method, method)
    if method == "consistency":
        _move(record, "noise.mean", "consistency.mean")
        _move(record, "noise.std", "consistency.std")
    if method == "emd":
        _move(record, "noise.weight", "emd.score_weight")
    if _take(record, "emd.half"):  # Langevin steps of (gamma/2, sqrt(gamma)): half the present gamma
        for name in ("step_eps", "step_z", "step_x"):
            record["emd"][name] /= 2
    for old, new in RENAMED.items():
        _move(record, old, new)
    remat = _take(record, "model.fields.remat")
    if remat:
        record["model"]["remat"] = "full" if remat is True else remat
    return record


def _take(record: dict[str, Any], path: str) -> Any:
    """Remove and return the field at a path; None if absent."""
    *parents, last = path.split(".")
    for parent in parents:
        record = record.get(parent, {})
    return record.pop(last, None)


def _move(record: dict[str, Any], old: str, new: str) -> None:
    value = _take(record, old)
    section, _, last = new.rpartition(".")
    if value is None or not last:
        return
    for parent in section.split("."):
        record = record.setdefault(parent, {})
    record[last] = value


# ------------------------------------------------------------------------------------------ parameters and states


def parameters(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays of an exported file, by parameter name."""
    if "step" in arrays and all(name == "step" or name.startswith("ema/") for name in arrays):
        return {name.removeprefix("ema/"): array for name, array in arrays.items() if name != "step"}
    return dict(arrays)


def is_first(names: Iterable[str]) -> bool:
    """Whether a checkpoint with these array names has format 1."""
    return not any(name.startswith(("params/student/", "averages/")) for name in names)


def first_state(declared: TrainState) -> dict[str, Tree]:
    """The structure in which format 1 stored such a state."""
    stored = {
        "step": declared.step,
        "params": declared.params["student"],
        "opt_state": declared.opt_state["student"],
        "ema": declared.averages.get("ema"),
        "target": declared.averages.get("target"),
        "score": declared.params.get("score"),
        "score_opt_state": declared.opt_state.get("score"),
        "frozen": declared.frozen or None,
    }
    return {name: value for name, value in stored.items() if value is not None}


def from_first(stored: Mapping[str, Tree], declared: TrainState) -> TrainState:
    """The state of a format 1 checkpoint."""
    params, opt_state = {"student": stored["params"]}, {"student": stored["opt_state"]}
    if "score" in declared.params:
        params["score"], opt_state["score"] = stored["score"], stored["score_opt_state"]
    averages = {name: stored[name] for name in declared.averages}
    return TrainState(stored["step"], params, opt_state, averages, stored.get("frozen", {}))
