"""Stored power-function averages of a run, and averages of any width combined from them after training.

workdir/averages/step_000001000.safetensors   every ema.snapshot_every steps: WIDTH/PARAMETER in float32
workdir/averages/ema_0.07.safetensors         a combined average, with the names of export.safetensors
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxdiff.methods.averaging import posthoc_coefficients
from jaxdiff.trees import Params, by_name
from jaxdiff.weights import files

FOLDER = "averages"


def write(workdir: Path, step: int, averages: Mapping[float, Params]) -> None:
    """Store the averages of a step."""
    path = Path(workdir) / FOLDER / f"step_{step:09d}.safetensors"
    path.parent.mkdir(exist_ok=True)
    arrays = {f"{width:g}/{name}": a for width, params in averages.items() for name, a in by_name(params).items()}
    files.write(path, arrays)


def stored(workdir: Path) -> dict[int, Path]:
    """The files of stored averages by step, ascending."""
    found = sorted((Path(workdir) / FOLDER).glob("step_*.safetensors"))
    return {int(match.group(1)): path for path in found if (match := re.fullmatch(r"step_(\d+)", path.stem))}


def discard_after(workdir: Path, step: int) -> None:
    """Remove averages of later steps, which a resumed run stores again."""
    for later, path in stored(workdir).items():
        if later > step:
            path.unlink()


def combined_path(workdir: Path, width: float) -> Path:
    """Where the combined average of a width is stored."""
    return Path(workdir) / FOLDER / f"ema_{width:g}.safetensors"


def combine(workdir: Path, widths: Sequence[float], step: int = 0) -> dict[float, dict[str, np.ndarray]]:
    """The averages of these widths at `step` (0: the last stored one), by width and name of the parameter."""
    paths = stored(workdir)
    if not paths:
        raise FileNotFoundError(
            f"no averages in {Path(workdir) / FOLDER}: train with --config.ema.widths=0.05,0.1 and "
            "--config.ema.snapshot_every=STEPS"
        )
    last = step or max(paths)
    if last not in paths:
        raise ValueError(f"no averages are stored for step {step} in {Path(workdir)}; choose one of {[*paths]}")
    used = {number: path for number, path in paths.items() if number <= last}
    tracked = {number: widths_in(path) for number, path in used.items()}
    pairs = [(number, width) for number in used for width in tracked[number]]
    steps, sizes = zip(*pairs, strict=True)
    table = posthoc_coefficients(steps, sizes, [last] * len(widths), list(widths))
    totals: dict[float, dict[str, np.ndarray]] = {float(width): {} for width in widths}
    for number, path in used.items():
        for name, array in files.read(path).items():
            width, parameter = name.split("/", 1)
            row = table[pairs.index((number, float(width)))]
            for total, coefficient in zip(totals.values(), row, strict=True):
                total[parameter] = total.get(parameter, np.float32(0)) + np.float32(coefficient) * array
    return totals


def widths_in(path: Path) -> list[float]:
    """The widths of the averages in a file."""
    return sorted({float(name.split("/", 1)[0]) for name in files.names(path)})
