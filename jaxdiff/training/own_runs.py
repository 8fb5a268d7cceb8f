"""Teachers of your own as runs: saved to a workdir, or opened for sampling and evaluation."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from flax import linen as nn
from jax import Array
from jax.sharding import Mesh
from ml_collections import ConfigDict

import jaxdiff.configs.default as default
from jaxdiff import weights
from jaxdiff.conditions import SEMANTIC, Cond, Conditions, signals_of
from jaxdiff.conventions import Convention
from jaxdiff.data import DataSpec, spec
from jaxdiff.denoisers import Denoiser
from jaxdiff.teacher import Teacher
from jaxdiff.training import components, export, loading, own, parameters
from jaxdiff.training.build import Run, build, load_data
from jaxdiff.training.loading import SavedRun
from jaxdiff.training.sampling import mesh_of
from jaxdiff.training.sharding import Devices
from jaxdiff.trees import Params, by_name


def save_teacher(
    model: nn.Module,
    params: Params,
    path: str | os.PathLike,
    *,
    shape: tuple[int, ...] = (),
    convention: Convention | None = None,
    config: ConfigDict | None = None,
) -> Path:
    """Write a trained network so that it can be a teacher.

    FILE.safetensors or FILE.npz has the parameters under their paths, for teacher.kind='run' with a config that
    describes the network. A folder becomes a run, which `sample`, `evaluate`, `compare` and --config=METHOD take: give
    the `shape` of an example, and the `convention` if it is not the one the network was published in. `config` (by
    default that of configs/default.py) says how it is sampled, and on which data it is evaluated.
    """
    path = Path(path)
    arrays = {name: np.asarray(leaf) for name, leaf in by_name(params).items()}
    if path.suffix in (".safetensors", ".npz"):
        weights.files.write(path, arrays)
        return path
    if not shape:
        raise ValueError(f"save_teacher writes a run to {path}: give shape=, that of one example, such as (32, 32, 3)")
    convention = convention or getattr(model, "published", None)
    if convention is None:
        raise ValueError(f"{type(model).__name__} has no `published` convention; give convention=, such as EDM(0.5)")
    teacher = Teacher(params, shape, Conditions(signals_of(model)).num_classes, model, convention)
    made = ConfigDict((config or default.get_config()).to_dict())
    own.adapt(made, teacher, str(path), ("data.source", "eval.net") if config is not None else ())
    made.teacher.kind, made.teacher.path, made.teacher.own = "run", "", False
    data = load_data(made)
    if tuple(data.shape) != tuple(shape):
        raise ValueError(f"the network makes examples of shape {tuple(shape)}, {data.name} has {data.shape}")
    path.mkdir(parents=True, exist_ok=True)
    spec.write(path, data)
    export.write(path, params)
    export.write_config(path, made)
    return path


class OwnTeacher(SavedRun):
    """A teacher that is not a run of the package: its parameters are given, and its denoiser may be."""

    def __init__(self, path: Path, run: Run, mesh: Mesh, params: Params, teacher: Teacher | None) -> None:
        super().__init__(path, run if teacher is None else sampled_run(run, teacher.denoise), mesh)
        self.teacher = teacher
        self.__dict__["params"] = params

    @property
    def step(self) -> None:
        """Unknown."""
        return None

    def rebuilt(self, config: ConfigDict, data: DataSpec) -> SavedRun:
        return OwnTeacher(self.workdir, build(config, data), self.mesh, self.params, self.teacher)


def open_teacher(config: ConfigDict, devices: Devices = None) -> SavedRun:
    """The teacher that `config.teacher` names, with its parameters and data; `config` says how it is sampled."""
    kind, path = config.teacher.kind, config.teacher.path
    if kind == "run":
        return loading.load(path, config, devices).with_data()
    run, mesh = build(config, load_data(config)), mesh_of(config, devices)
    made: Teacher | None = None
    if kind == "python":
        made = own.read(path, config)
        own.check(made, config, run.data, run.model, run.convention)
        params = made.params
    else:
        loaded = parameters.read(path, kind, run.model)
        parameters.check_convention(loaded, run.convention)
        params = parameters.fitted(loaded, parameters.shapes_of(run.model, run.conditions, run.data.shape))
    return OwnTeacher(Path(path), run, mesh, jax.device_put(params), made)


def sampled_run(run: Run, denoiser: Callable[[Params], Denoiser]) -> Run:
    """The run of a diffusion model with its denoiser replaced, as for a teacher that is no network of ours."""
    sampling = components.sampling_of(run.config, run.convention, run.solver, run.conditions.null(SEMANTIC), None)
    solve = sampling.solve
    assert solve is not None

    def sample(params: Params, noise: Array, cond: Cond = None, key: Array | None = None) -> Array:
        return solve(denoiser(params), noise, cond, key)

    method = run.method._replace(sample=sample, denoiser=denoiser, correct=None)
    return dataclasses.replace(run, method=method)
