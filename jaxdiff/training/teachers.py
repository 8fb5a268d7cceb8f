"""The teacher of a distillation: config.teacher.kind and config.teacher.path.

run        a workdir of `jaxdiff train`
edm, ...   public weights of that kind (see jaxdiff.weights): an .npz or .safetensors file
python     FILE.py:load, a function load(config) that returns a jaxdiff.Teacher (own.py)
analytic   the exact denoiser of a `mixture` data source; the student then starts untrained
fresh      an untrained network, to try out a config

The teacher has the student's architecture unless teacher.fields says otherwise, step conditioning only if it is itself
an SFD-v student, and none of the scalars of a flow map.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
from flax import linen as nn
from ml_collections import ConfigDict

from jaxdiff import denoisers
from jaxdiff.conditions import Conditions
from jaxdiff.conventions import Convention
from jaxdiff.data import DataSpec, mixture_components
from jaxdiff.errors import choose
from jaxdiff.methods import Frozen, Method, Teacher, TrainState
from jaxdiff.methods.method import Batch, Metrics
from jaxdiff.methods.sfd import teacher_model
from jaxdiff.models import bind
from jaxdiff.training import bucket, components, export, parameters
from jaxdiff.training.own import teacher_of
from jaxdiff.trees import Params

# fields of a network that may differ from the student's
PRIVATE = ("parent", "name", "dtype", "remat", "loop", "dropout", "step_embed", "scalars", "mask_buckets")
MIXTURE = ("preset", "dim", "std", "means", "weights")  # options of the data source that define its density


def make(
    config: ConfigDict, model: nn.Module, convention: Convention, conditions: Conditions, data: DataSpec
) -> Teacher:
    """The teacher of `config.teacher`; nothing is read until its parameters are needed."""
    kind = choose(config.teacher.kind, ("run", "python", "analytic", "fresh", *parameters.PUBLIC), "teacher kind")
    if kind == "python":
        return teacher_of(config, model, convention, data)
    if kind == "analytic":
        exact = _analytic(config)
        return Teacher(lambda params: exact, Frozen(dict, dict), own=False)
    parameters.check_public(kind, config.teacher.path, convention)
    same = teacher_model(model, config.sfd.teacher_step if config.method.name == "sfd" else 0)
    network = _network(config, same, convention, data)

    def shapes() -> Params:
        return parameters.shapes_of(network, conditions, data.shape)

    def load() -> Params:
        if kind == "fresh":
            return jax.device_get(parameters.initial(network, conditions, data.shape, config.seed))
        path = _path(config)
        if kind == "run":
            _check_run(path, config, network, convention, data)
        loaded = parameters.read(path, kind, network)
        parameters.check_convention(loaded, convention)
        return parameters.fitted(loaded, shapes())

    frozen, own = Frozen(shapes, load), network is same
    return Teacher(lambda params: convention(bind(network, params)), frozen, own, None if own else network)


def _network(config: ConfigDict, same: nn.Module, convention: Convention, data: DataSpec) -> nn.Module:
    """The teacher's network: `same` unless teacher.fields differ from the student's."""
    if not config.teacher.fields:
        return same
    theirs = config.copy_and_resolve_references()
    with theirs.unlocked():
        theirs.model.fields = theirs.teacher.fields
    network = teacher_model(components.model_of(theirs, data, convention), 0)
    return same if not _differing(network, same) else network


def _differing(network: nn.Module, other: nn.Module) -> list[str]:
    """The fields in which two networks have other weights."""
    names = [field.name for field in dataclasses.fields(network) if field.name not in (*PRIVATE, "control")]
    return [name for name in names if getattr(network, name) != getattr(other, name, "absent")]


def offloaded(method: Method) -> Method:
    """The method with its frozen arrays in host memory, copied to the devices when they are used."""

    def near(state: TrainState) -> TrainState:
        return dataclasses.replace(state, frozen=jax.device_put(state.frozen, jax.memory.Space.Device))

    def step(state: TrainState, batch: Batch, key: jax.Array) -> tuple[TrainState, Metrics]:
        new, metrics = method.step(near(state), batch, key)
        return dataclasses.replace(new, frozen=state.frozen), metrics

    def correct(state: TrainState, *arguments: Any, **how: Any) -> tuple[jax.Array, jax.Array]:
        assert method.correct is not None
        return method.correct(near(state), *arguments, **how)

    return method._replace(step=step, correct=correct if method.correct else None)


def _analytic(config: ConfigDict) -> denoisers.Denoiser:
    if config.data.source != "mixture":
        raise ValueError(
            f"teacher.kind='analytic' needs data.source='mixture', got {config.data.source!r}; "
            "train a teacher and set teacher.kind='run' and teacher.path to its workdir"
        )
    options = {name: value for name, value in config.data.options.items() if name in MIXTURE}
    return denoisers.gaussian_mixture(*mixture_components(**options))


def _path(config: ConfigDict) -> Path:
    if not config.teacher.path:
        raise ValueError(
            "distillation needs a teacher: --config.teacher.path=WORKDIR of a run (train one with: jaxdiff train "
            "--config=configs/digits.py --workdir=runs/digits), or a weights file with --config.teacher.kind=edm"
        )
    return bucket.reading(config.teacher.path)


def _check_run(path: Path, config: ConfigDict, network: nn.Module, convention: Convention, data: DataSpec) -> None:
    """Check that the run has the student's network, up to fields that do not affect weights, and suits these steps."""
    if not path.exists():
        raise FileNotFoundError(
            f"no teacher at {path.absolute()}: train one, for example with jaxdiff train --config=configs/digits.py "
            f"--workdir={path}, and pass that folder as --config.teacher.path"
        )
    if not path.is_dir():
        return  # an exported file without config: only names and shapes can be compared
    trained = export.read_config(path)
    theirs = components.model_of(trained, data, components.convention_of(trained))
    conditioned = bool(getattr(theirs, "step_embed", ""))
    if conditioned != bool(getattr(network, "step_embed", "")):
        if conditioned:
            raise ValueError(
                f"the teacher {path} is a student with step conditioning: set model.fields.step_embed='zero' and "
                "sfd.teacher_step to its number of timestamps"
            )
        raise ValueError(f"sfd.teacher_step is set, but the teacher {path} has no step conditioning; set it to 0")
    for name in _differing(network, theirs):
        ours, other = getattr(network, name), getattr(theirs, name, "absent")
        raise ValueError(
            f"the student must have the teacher's architecture: model field {name} is {ours} here and {other} in "
            f"{path}; for a student of another size, teacher.fields holds the teacher's"
        )
    if trained.method.name == "sfd":
        _check_walk(config, trained, path)


def _check_walk(config: ConfigDict, trained: ConfigDict, path: Path) -> None:
    """A teacher that is itself a student must be run on a grid it was trained for."""
    c, sample = config.sfd, trained.sample
    wanted = sorted((nfe + config.sample.afs) * c.substeps - c.teacher_afs for nfe in c.nfe)
    made = tuple(trained.sfd.nfe)
    wrong = []
    if set(wanted) - set(made):
        wrong.append(f"{', '.join(map(str, wanted))} evaluations, not one of {made}")
    for name in ("grid", "rho", "sigma_min", "sigma_max"):
        if config.sample[name] != sample[name]:
            wrong.append(f"sample.{name}={config.sample[name]}, not {sample[name]}")
    if c.teacher_afs != sample.afs:
        wrong.append(f"sfd.teacher_afs={c.teacher_afs}, not {sample.afs}")
    if c.solver != "euler":
        wrong.append(f"sfd.solver={c.solver!r}, not 'euler'")
    if wrong:
        raise ValueError(f"the teacher {path} is a student that was trained for other steps: {'; '.join(wrong)}")
