"""A run for others: the files that `jaxdiff.load` needs and a model card, written to a folder or to the hub.

The card says what was trained on what, how to sample, and every recorded number with its protocol. It is made from the
files of the workdir alone.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

import jaxdiff
from jaxdiff import outside
from jaxdiff.data import DataSpec, spec
from jaxdiff.errors import optional_import
from jaxdiff.remote import FilePath, naming
from jaxdiff.training import bucket, export

FILES = ("config.json", "data.json", "data.npz", export.FILE, export.LORA, "evaluations.jsonl")
REQUIRED = ("config.json", "data.json", export.FILE)
CARD = "README.md"
TAGS = ("jax", "flax", "diffusion")
ROWS = 20  # of the card's table of evaluations
SHOWN = (  # columns of that table, of the protocol
    *("solver", "nfe", "guidance", "samples", "reference", "reference_samples"),
    *("feature_net", "resize", "ema", "seed"),
)
LOCAL = ("compile_cache", "teacher.path", "train.init_from", "data.options.path")  # keys that may name your folders


def push(workdir: FilePath, repo: str, *, private: bool = False, license: str = "") -> str:
    """Upload a run to a model repository of the Hugging Face hub, which is created if need be; returns its URL.

    huggingface_hub finds the credentials: those of `hf auth login`, or $HF_TOKEN.
    """
    hub = optional_import("huggingface_hub", "jaxdiff push", "hub")
    with tempfile.TemporaryDirectory(prefix="jaxdiff-") as folder:
        write(workdir, Path(folder), repo, license)
        with naming(f"hf://{repo}", "write"):
            api = hub.HfApi()
            url = api.create_repo(repo, private=private, exist_ok=True)
            api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Run of jaxdiff")
    return str(url)


def write(workdir: FilePath, folder: Path, repo: str, license: str = "") -> list[str]:
    """Copy what sampling needs, and the model card, to a folder; returns the names of the files."""
    owner, _, name = repo.partition("/")
    if not owner or not name or "/" in name:
        raise ValueError(f"a repository is OWNER/NAME, got {repo!r}")
    source = bucket.reading(workdir, logs=True)
    missing = [file for file in REQUIRED if not (source / file).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{workdir} has no {', '.join(missing)}: only a run that has finished or was stopped can be uploaded"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for file in FILES:
        if (source / file).is_file():
            shutil.copyfile(source / file, folder / file)
    if (source / outside.FOLDER).is_dir():
        shutil.copytree(source / outside.FOLDER, folder / outside.FOLDER, dirs_exist_ok=True)
    (folder / CARD).write_text(card(source, repo, license), encoding="utf-8")
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def local_paths(workdir: FilePath) -> dict[str, str]:
    """Keys of the run's config that name a file or folder of the machine it ran on."""
    config = json.loads((bucket.reading(workdir) / "config.json").read_text(encoding="utf-8"))
    found = {}
    for key in LOCAL:
        value: Any = config
        for part in key.split("."):
            value = value.get(part, "") if isinstance(value, dict) else ""
        if isinstance(value, str) and value:
            found[key] = value
    return found


# ------------------------------------------------------------------------------------------ the card


def card(workdir: Path, repo: str, license: str = "") -> str:
    """The model card of a run, in Markdown with the hub's metadata."""
    config, step = export.read_config(workdir), export.read_step(workdir)
    arrays, data = export.read_arrays(workdir), spec.read(workdir)
    assert data is not None  # data.json is required
    parts = [
        _metadata(config, license, data),
        f"# {repo.partition('/')[2]}",
        _summary(data, config, step, sum(array.size for array in arrays.values())),
        _use(repo, config),
        _numbers(records(workdir)),
        _files(workdir),
    ]
    return "\n\n".join(parts) + "\n"


def _metadata(config: ConfigDict, license: str, data: DataSpec) -> str:
    lines = ["---", "library_name: jaxdiff", "tags:", *(f"- {tag}" for tag in (*TAGS, config.method.name))]
    if len(data.shape) == 3:
        task = "text-to-image" if "text" in data.signals else "unconditional-image-generation"
        lines.append(f"pipeline_tag: {task}")
    lines += [f"license: {json.dumps(license)}"] if license else []
    return "\n".join([*lines, "---"])


def _summary(data: DataSpec, config: ConfigDict, step: int | None, size: int) -> str:
    shape = " x ".join(map(str, data.shape))
    classes = f", {data.num_classes} classes" if data.num_classes else ""
    rows = {
        "method": f"`{config.method.name}`",
        "network": f"`{config.model.name}`, {size:,} parameters",
        "data": f"`{data.name}`, {data.size:,} examples of shape {shape}{classes}",
        "trained for": f"{step:,} steps of {config.data.batch_size:,} examples" if step is not None else "not recorded",
        "sampler": f"`{config.sample.solver}`, {config.sample.timestamps} timestamps",
        "jaxdiff": jaxdiff.__version__,
    }
    if config.method.name != "diffusion":
        rows["teacher"] = f"kind `{config.teacher.kind}`"
    return _table(("", ""), [[name, value] for name, value in rows.items()])


def _use(repo: str, config: ConfigDict) -> str:
    lines = [
        "## Use",
        "",
        "```python",
        "import jaxdiff",
        "",
        f'run = jaxdiff.load("hf://{repo}")  # needs the extra: pip install "jaxdiff[hub]"',
        "images = run.sample(0, 16)  # [n h w c] in [-1, 1]; image i depends on (key, i) alone",
        "```",
    ]
    if outside.is_reference(config.model.name):
        lines += [
            "",
            "The network is Python code of this repository, which is not run from here: download the repository, read "
            "the code, and load the folder.",
        ]
    return "\n".join(lines)


def records(workdir: Path) -> list[Mapping[str, Any]]:
    """The evaluations of a run, oldest first; a truncated line is passed over."""
    path = workdir / "evaluations.jsonl"
    if not path.is_file():
        return []
    found: list[Mapping[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("protocol"), dict):
            found.append(record)
    return found


def _numbers(evaluated: list[Mapping[str, Any]]) -> str:
    if not evaluated:
        return "## Numbers\n\nThis run was not evaluated."
    rows, notes = [], []
    for record in evaluated[-ROWS:]:
        protocol = record["protocol"]
        spread = record.get("spread") or {}
        values = [
            f"{name} {_value(value)}" + (f" ± {_value(spread[name])}" if name in spread else "")
            for name, value in record.items()
            if _is_metric(name, value)
        ]
        rows.append([record.get("step"), ", ".join(values), *(protocol.get(name) for name in SHOWN)])
        notes += [str(protocol.get("feature_sha256")), str(protocol.get("reference_sha256"))]
    left = len(evaluated) - len(rows)
    older = f" {left} older ones are in evaluations.jsonl." if left else ""
    sums = ", ".join(f"`{text[:16]}`" for text in dict.fromkeys(notes))
    return (
        "## Numbers\n\n"
        + _table(("step", "metrics", *(name.replace("_", " ") for name in SHOWN)), rows)
        + f"\n\nsha256 of the feature network and of the reference begin with {sums}. evaluations.jsonl has the whole "
        + f"protocol of each row.{older}"
    )


def _is_metric(name: str, value: object) -> bool:
    settings = name == "step" or name.endswith(("_k", "_splits", "repeats"))
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not settings


def _value(value: float) -> str:
    return f"{value:.4g}"


def _files(workdir: Path) -> str:
    held = {"config.json": "the config", "data.json": "what the data were", export.FILE: "parameters, float arrays"}
    lines = [f"- `{name}`: {what}" for name, what in held.items()]
    if (workdir / outside.FOLDER).is_dir():
        lines.append(f"- `{outside.FOLDER}/`: Python code of the network")
    return "\n".join(["## Files", "", *lines])


def _table(head: tuple[str, ...], rows: list[list[Any]]) -> str:
    cells = [[_cell(value) for value in row] for row in rows]
    lines = ["| " + " | ".join(row) + " |" for row in [list(head), ["---"] * len(head), *cells]]
    return "\n".join(lines)


def _cell(value: object) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, (float, np.floating)):
        return _value(float(value))
    return str(value).replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")
