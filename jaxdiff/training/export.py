"""What sampling needs, in two plain files: config.json and export.safetensors. No mesh, no Orbax."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxdiff.configs import default
from jaxdiff.trees import by_name, misfits, path_name
from jaxdiff.weights import files


def write_config(workdir: Path, config: ConfigDict) -> None:
    """config.json, whole or not at all."""
    path = Path(workdir) / "config.json"
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(config.to_dict(), indent=2, sort_keys=True, default=_plain) + "\n", encoding="utf-8")
    partial.replace(path)


def _plain(value: Any) -> Any:
    """What JSON has no word for: arrays (data given in memory) are described, not written."""
    if isinstance(value, np.ndarray):
        return f"array {value.dtype} {value.shape}"
    return value.item() if isinstance(value, np.generic) else list(value)


def read_config(workdir: Path) -> ConfigDict:
    """The config a run was made with."""
    path = Path(workdir) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"no run at {Path(workdir).absolute()}: there is no config.json. "
            "Make one with: jaxdiff train --config=configs/digits.py --workdir=" + str(workdir)
        )
    config = ConfigDict(_tuples(json.loads(path.read_text(encoding="utf-8"))))
    _fill(config, default.get_config())
    config.lock()
    return config


def _fill(config: ConfigDict, defaults: ConfigDict) -> None:
    """Fields that came after the run was made get their default."""
    for name, value in defaults.items():
        if name not in config:
            config[name] = value
        elif isinstance(value, ConfigDict):
            _fill(config[name], value)


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tuples(entry) for key, entry in value.items()}
    return tuple(_tuples(entry) for entry in value) if isinstance(value, list) else value


def write(workdir: Path, exported: Any) -> Path:
    """The exported state's arrays under their paths."""
    path = Path(workdir) / "export.safetensors"
    files.write(path, {name: np.asarray(leaf) for name, leaf in by_name(exported).items()})
    return path


def read(path: Path, abstract: Any) -> Any:
    """The exported state in the declared structure; every missing or mis-shaped array is an error."""
    arrays = _arrays(path)
    wrong = misfits(arrays, by_name(abstract))
    if wrong:
        raise ValueError(f"{path} belongs to another model: {wrong}")
    return jax.tree_util.tree_map_with_path(lambda p, leaf: jax.numpy.asarray(arrays[path_name(p)]), abstract)


def read_average(path: Path) -> dict[str, np.ndarray]:
    """The exported parameters by name, whatever network they belong to."""
    arrays = _arrays(path)
    return {name.removeprefix("ema/"): array for name, array in arrays.items() if name.startswith("ema/")}


def _arrays(path: Path) -> dict[str, np.ndarray]:
    path = Path(path)
    path = path / "export.safetensors" if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(
            f"no exported weights at {path.absolute()}: finish the run, or stop it, to have them written"
        )
    return files.read(path)
