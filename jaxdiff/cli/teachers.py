"""Teachers for commands: a run, public weights, or a Python file, with the overrides of the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ml_collections import ConfigDict

import jaxdiff.configs.default as default
from jaxdiff import outside
from jaxdiff.cli.options import override
from jaxdiff.training import SavedRun, inherit, open_teacher, own

PROBLEM = ("seed", "data", "model", "denoiser", "noise", "eval", "mesh", "compile_cache")  # inherited by students


def kind_of(path: str, kind: str = "") -> str:
    """The kind of --teacher: given, or python for FILE.py:NAME, or run."""
    if kind:
        return kind
    return "python" if outside.is_reference(path) and not Path(path).exists() else "run"


def config_of(kind: str, path: str, overrides: Sequence[tuple[str, str]]) -> ConfigDict:
    """The config of a teacher: its run's, or what a Python file or public weights determine, with the overrides.

    Overrides of data, network, convention and evaluation are applied here, since a student inherits them.
    """
    problem = [(key, text) for key, text in overrides if key.split(".")[0] in PROBLEM]
    if kind == "run":
        config = inherit.run_config(path)
        with config.unlocked():
            override(config, problem)
        return config
    config = default.get_config()
    override(config, problem)
    if kind == "python":
        own.adapt(config, own.read(path, config), path, [key for key, _ in problem])
    else:
        own.public_config(kind, path, config)
    return config


def opened(path: str, kind: str, overrides: Sequence[tuple[str, str]]) -> SavedRun:
    """The teacher as a run, to sample and evaluate; all overrides apply."""
    kind = kind_of(path, kind)
    config = config_of(kind, path, overrides)
    with config.unlocked():
        config.teacher.kind, config.teacher.path = kind, path
    override(config, overrides)
    return open_teacher(config)
