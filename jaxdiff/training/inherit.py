"""The config of a student from its teacher: network, convention, data, conditions and evaluation are inherited."""

from __future__ import annotations

from pathlib import Path

from ml_collections import ConfigDict

from jaxdiff.errors import choose
from jaxdiff.methods import METHODS
from jaxdiff.training import bucket, export

STAGES = {"sfd": ("sfd",)}  # methods that also distil the students of others


def recipes() -> list[str]:
    """The methods that a teacher's config is enough for."""
    return [name for name, entry in METHODS.items() if entry.recipe is not None]


def run_config(path: str | Path) -> ConfigDict:
    """The config of the run that is to be the teacher."""
    folder = bucket.reading(path)
    if not folder.is_dir():
        found = "is a file, which does not say how its network was trained" if folder.exists() else "does not exist"
        raise FileNotFoundError(
            f"the teacher {folder.absolute()} {found}; give the workdir of a run (train one with: jaxdiff train "
            f"--config=digits --workdir={path}), or a config of its own for the student"
        )
    config = export.read_config(folder)
    if config.curriculum:
        names = ", ".join(config.curriculum)
        raise ValueError(f"the run {path} has stages; give the folder of one of them as the teacher: {names}")
    return config


def student_config(teacher: ConfigDict, method: str, argument: str, kind: str, path: str) -> ConfigDict:
    """The config that trains `method` from the teacher at `path`, whose own config is `teacher`."""
    entry = METHODS[choose(method, recipes(), "method with a recipe")]
    trained = teacher.method.name
    if trained != "diffusion" and trained not in STAGES.get(method, ()):
        raise ValueError(
            f"{method} distils a diffusion model, {path} was trained by {trained}; give the run of its teacher"
            + (f", {teacher.teacher.path}" if teacher.teacher.path else "")
        )
    config = ConfigDict(teacher.to_dict())
    if kind != "python":
        config.teacher.own = False
    config.teacher.kind, config.teacher.path, config.teacher.sha256 = kind, path, ""
    config.train.init_from, config.train.init_kind = "", "run"
    config.train.eval_every = config.train.sample_every = 0
    config.ema.widths, config.ema.snapshot_every = (), 0
    config.lora.rank = 0
    config.sample.average, config.sample.weak, config.sample.control_guidance = 0.0, "", 1.0
    if not entry.data:
        config.noise.assignment, config.noise.assignment_options = "none", ConfigDict()
    assert entry.recipe is not None
    entry.recipe(config, argument)
    config.lock()
    return config
