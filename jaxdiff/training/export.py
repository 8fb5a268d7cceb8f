"""What sampling needs, in plain files: config.json, data.json and export.safetensors. No mesh, no Orbax.

Format 2 stores parameters under their own names. Workdirs of format 1 (no format number in config.json; names ema/...,
a step among the arrays; earlier field names) can still be read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from ml_collections import ConfigDict

import jaxdiff.configs.default as default
from jaxdiff import models, outside, weights
from jaxdiff.files import DamagedFile, read_json, write_json
from jaxdiff.models.low_rank import Adapters
from jaxdiff.training import formats
from jaxdiff.trees import Params, by_name
from jaxdiff.weights import files

FILE = "export.safetensors"
LORA = "lora.safetensors"
SECTIONS = ("data", "model", "denoiser", "method", "noise", "optim", "train", "sample")  # of every config
FLOATS = (np.float32, jnp.bfloat16, np.float16)  # of exported parameters


def write_config(workdir: Path, config: ConfigDict) -> None:
    """Write config.json atomically, with a checksum."""
    record = {"format": formats.FORMAT, **config.to_dict()}
    _keep_code(record, Path(workdir))
    write_json(Path(workdir) / "config.json", record, _plain)


def _keep_code(record: dict[str, Any], workdir: Path) -> None:
    """Copy code from outside the package into the workdir: the network's, which sampling needs, and the teacher's."""
    network, teacher = record["model"], record["teacher"]
    registered = models.MODELS.get(network["name"])
    if registered is not None and registered.__module__.split(".")[0] != "jaxdiff":
        network["name"] = outside.reference_to(registered) or network["name"]
    if outside.is_reference(network["name"]):
        network["name"], network["sha256"] = outside.keep(network["name"], workdir)
    if teacher["kind"] == "python" and outside.file_of(teacher["path"]) is not None:
        teacher["sha256"] = outside.keep(teacher["path"], workdir)[1]


def _find_code(config: ConfigDict, workdir: Path) -> None:
    """Point to the workdir's copy of the network's file, and of the teacher's where the original is gone."""
    network, teacher = config.model, config.teacher
    network.name = outside.located(network.name, workdir, network.sha256)
    if teacher.kind == "python":
        file = outside.file_of(teacher.path)
        if file is not None and not file.is_file():
            copy = workdir / outside.FOLDER / file.name
            teacher.path = f"{copy}:{outside.split(teacher.path)[1]}"


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
    record = read_json(path, "the config of a run")
    missing = [name for name in SECTIONS if not isinstance(record.get(name), dict)]
    if missing:
        raise DamagedFile(
            f"{path} is not the whole config of a run: it has no {', '.join(missing)}; restore it from a copy"
        )
    config = ConfigDict(_tuples(formats.current(record, path)))
    _fill(config, default.get_config())
    _find_code(config, path.parent)
    config.lock()
    return config


def _fill(config: ConfigDict, defaults: ConfigDict) -> None:
    """Set fields added since the run to their defaults."""
    for name, value in defaults.items():
        if name not in config:
            config[name] = value
        elif isinstance(value, ConfigDict):
            if not isinstance(config[name], ConfigDict):
                raise DamagedFile(f"the config of this run has {name} = {config[name]!r} in place of a section")
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


def write_lora(workdir: Path, model: nn.Module, adapters: Adapters, kind: str) -> str:
    """Write low-rank updates under the diffusers library's names, where it has some; returns what was done."""
    kind = weights.lora_kind(model, kind)
    if not kind:
        return f"no {LORA}: diffusers has no names for {type(model).__name__}"
    try:
        weights.save_lora(model, adapters, kind, Path(workdir) / LORA)
    except weights.WeightsError as error:
        return f"no {LORA}: {error}"
    return f"low-rank updates written to {Path(workdir) / LORA}"


def read_step(workdir: Path) -> int | None:
    """The step of the exported parameters; None if their file does not say."""
    known = files.metadata(Path(workdir) / FILE)
    return int(known["step"]) if "step" in known else None


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The exported parameters of a workdir or file, by name; each must be of finite floats."""
    path = Path(path)
    path = path / FILE if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(
            f"no exported weights at {path.absolute()}: they are written when a run finishes or is stopped"
        )
    arrays = formats.parameters(files.read(path))
    for name, array in arrays.items():
        if array.dtype not in FLOATS:
            kinds = ", ".join(np.dtype(kind).name for kind in FLOATS)
            raise ValueError(f"{path}: {name} is {array.dtype}, exported parameters are {kinds}; export them again")
        if not np.isfinite(array.astype(np.float32)).all():
            raise ValueError(f"{path}: {name} has NaN or infinite values, which cannot be sampled; export it again")
    return arrays
