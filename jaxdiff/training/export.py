"""What sampling needs, in plain files: config.json, data.json and export.safetensors. No mesh, no Orbax.

Format 2 stores parameters under their own names. Workdirs of format 1 (no format number in config.json; names ema/...,
a step among the arrays; earlier field names) can still be read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict
from safetensors import safe_open

import jaxdiff.configs.default as default
from jaxdiff.training import formats
from jaxdiff.trees import Params, by_name
from jaxdiff.weights import files

FILE = "export.safetensors"


def write_config(workdir: Path, config: ConfigDict) -> None:
    """Write config.json atomically."""
    path = Path(workdir) / "config.json"
    partial = path.with_suffix(".part")
    record = {"format": formats.FORMAT, **config.to_dict()}
    partial.write_text(json.dumps(record, indent=2, sort_keys=True, default=_plain) + "\n", encoding="utf-8")
    partial.replace(path)


def _plain(value: Any) -> Any:
    """A JSON value for types that JSON lacks: arrays (in-memory data) are described, not written."""
    if isinstance(value, np.ndarray):
        return f"array {value.dtype} {value.shape}"
    return value.item() if isinstance(value, np.generic) else list(value)


def read_config(workdir: Path) -> ConfigDict:
    """The config a run was trained with."""
    path = Path(workdir) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"no run at {Path(workdir).absolute()}: there is no config.json. "
            "Train one with: jaxdiff train --config=configs/digits.py --workdir=" + str(workdir)
        )
    record = formats.current(json.loads(path.read_text(encoding="utf-8")), path)
    config = ConfigDict(_tuples(record))
    _fill(config, default.get_config())
    config.lock()
    return config


def _fill(config: ConfigDict, defaults: ConfigDict) -> None:
    """Set fields added since the run to their defaults."""
    for name, value in defaults.items():
        if name not in config:
            config[name] = value
        elif isinstance(value, ConfigDict):
            _fill(config[name], value)


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tuples(entry) for key, entry in value.items()}
    return tuple(_tuples(entry) for entry in value) if isinstance(value, list) else value


def write(workdir: Path, params: Params, step: int | None = None) -> Path:
    """Write the parameters, named by their paths, and the step they are of."""
    path = Path(workdir) / FILE
    known = {} if step is None else {"step": str(step)}
    files.write(path, {name: np.asarray(leaf) for name, leaf in by_name(params).items()}, known)
    return path


def read_step(workdir: Path) -> int | None:
    """The step of the exported parameters; None if their file does not say."""
    with safe_open(Path(workdir) / FILE, framework="numpy") as file:
        known = file.metadata() or {}
    return int(known["step"]) if "step" in known else None


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The exported parameters of a workdir or file, by name."""
    path = Path(path)
    path = path / FILE if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(
            f"no exported weights at {path.absolute()}: they are written when a run finishes or is stopped"
        )
    return formats.parameters(files.read(path))
