"""Teachers of your own, the function `load(config)` of a Python file (docs/own_teacher.md).

read(reference, config) -> Teacher          executes the file
teacher_of(config, ...) -> methods.Teacher  what a method trains from; executes nothing until training starts
adapt(config, teacher, ...)                 the config of a student, from what the teacher says of itself
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Any

import jax
from flax import linen as nn
from ml_collections import ConfigDict

from jaxdiff import conventions, models, outside, weights
from jaxdiff.conditions import Conditions, signals_of
from jaxdiff.conventions import DDPM, EDM, Convention
from jaxdiff.data import DataSpec
from jaxdiff.denoisers import Denoiser
from jaxdiff.errors import choose
from jaxdiff.evaluation import compact
from jaxdiff.methods import METHODS, Frozen
from jaxdiff.methods import Teacher as Source
from jaxdiff.models.plain import Plain, fields_of
from jaxdiff.teacher import Teacher
from jaxdiff.training import parameters
from jaxdiff.trees import Params, by_name, mismatches

STEPS = 16_000  # what recipes take a share of, where the teacher's own number is unknown


def read(reference: str, config: ConfigDict, sha256: str = "") -> Teacher:
    """What `load(config)` of FILE.py:load returns."""
    if not outside.is_reference(reference):
        raise ValueError(
            f"teacher.kind='python' needs teacher.path=FILE.py:NAME, a function load(config) that returns a "
            f"jaxdiff.Teacher, got {reference!r}"
        )
    load = outside.attribute(reference, sha256)
    if not callable(load):
        raise TypeError(f"{reference} is a {type(load).__name__}; it must be a function load(config)")
    made = load(config)
    if not isinstance(made, Teacher):
        raise TypeError(f"{reference} returned a {type(made).__name__}; it must return a jaxdiff.Teacher")
    return made


def teacher_of(config: ConfigDict, model: nn.Module, convention: Convention, data: DataSpec) -> Source:
    """The teacher of a method. The file is executed when shapes or parameters are asked for: never to sample."""

    @cache
    def given() -> Teacher:
        made = read(config.teacher.path, config, config.teacher.sha256)
        check(made, config, data, model, convention)
        return made

    def denoiser(params: Params) -> Denoiser:
        return given().denoise(params)

    def shapes() -> Params:
        return jax.eval_shape(lambda: given().params)

    return Source(denoiser, Frozen(shapes, lambda: jax.device_get(given().params)), own=config.teacher.own)


def check(made: Teacher, config: ConfigDict, data: DataSpec, model: nn.Module, convention: Convention) -> None:
    """The teacher suits the data, the student's network and the method."""
    path, method = config.teacher.path, config.method.name
    if not made.differentiable and method != "diffusion" and not METHODS[method].values_only:
        serves = [name for name, entry in METHODS.items() if entry.values_only]
        raise ValueError(
            f"{method} takes gradients through its teacher, and {path} says differentiable=False; it serves "
            f"{', '.join(serves)}"
        )
    if tuple(made.shape) != tuple(data.shape):
        raise ValueError(f"{path} makes examples of shape {tuple(made.shape)}, {data.name} has {tuple(data.shape)}")
    classes = Conditions(signals_of(model)).num_classes
    if classes and made.num_classes != classes:
        raise ValueError(
            f"{path} has num_classes={made.num_classes}, the student's network {classes}; set "
            f"model.fields.num_classes={made.num_classes}, or num_classes in the teacher"
        )
    if not config.teacher.own:
        return
    if made.convention is not None and made.convention != convention:
        raise ValueError(
            f"{path} has the convention {made.convention!r}, the student {convention!r}; leave `denoiser` as inherited"
        )
    wanted = by_name(parameters.shapes_of(model, Conditions.of_model(model), data.shape))
    wrong = mismatches(by_name(made.params), wanted, partial=True)
    if wrong:
        raise ValueError(
            f"the parameters of {path} do not match the student's network: {wrong}; set teacher.own=false for a "
            "student that starts untrained"
        )


# ------------------------------------------------------------------------------------------ its config


def adapt(config: ConfigDict, teacher: Teacher, path: str, chosen: Collection[str] = ()) -> None:
    """Set what the teacher determines, in place, but for the keys in `chosen`: data, network, convention, noise levels.

    Without data of its own a student is trained on none (data.source='blank').
    """
    config.teacher.kind, config.teacher.path = "python", path
    if "data.source" not in chosen:
        shape = tuple(int(side) for side in teacher.shape)
        config.data.source = "blank"
        config.data.options = ConfigDict({"shape": shape, "num_classes": int(teacher.num_classes)})
    if "model.name" not in chosen:
        if teacher.network is None:
            raise ValueError(
                f"{path} gives no network, so the student needs one: --config.model.name=unet, mlp, dit or another, "
                "with its fields, for example --config.model.fields.resolution=28"
            )
        config.model.name, config.model.fields = network_config(teacher, path)
        config.teacher.own = True
    if teacher.convention is not None and "denoiser.kind" not in chosen:
        set_convention(config, teacher.convention)
    if "eval.net" not in chosen:
        config.eval.net = "compact" if compact.suits(teacher.shape) else ""
    config.train.steps = STEPS


def network_config(teacher: Teacher, path: str) -> tuple[str, ConfigDict]:
    """model.name and model.fields that rebuild the teacher's network without calling `load`."""
    network = teacher.network
    if isinstance(network, Plain):
        name = _name_of(network, path)
        fields = {"channels": int(teacher.shape[-1]), "num_classes": int(teacher.num_classes)}
    else:
        assert network is not None
        name = known_name(network) or outside.reference_to(type(network))
        fields = fields_of(teacher.model)
    if not name:
        raise ValueError(f"the network of {path} must be defined at the top level of a file, to be found again")
    return name, ConfigDict({key: _plain(value, key, path) for key, value in fields.items()})


def known_name(network: nn.Module) -> str:
    """The name of a network in MODELS; "" for others."""
    return next((name for name, kind in models.MODELS.items() if kind is type(network)), "")


def _name_of(network: Plain, path: str) -> str:
    place, _ = outside.split(path)
    file = outside.file_of(path)
    module = outside.imported(file) if file else outside.module(place)
    names = [name for name, value in vars(module).items() if value is network]
    if not names:
        raise ValueError(f"the network of {path} must have a name at the top level of the file, to be found again")
    return f"{place}:{names[0]}"


def _plain(value: Any, name: str, path: str) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)):
        return tuple(_plain(part, name, path) for part in value)
    raise ValueError(f"field {name!r} of the network of {path} is a {type(value).__name__}, which JSON cannot hold")


def set_convention(config: ConfigDict, convention: Convention) -> None:
    """The section `denoiser` of a convention, and noise levels that it has."""
    c = config.denoiser
    c.kind = next(name for name, kind in conventions.CONVENTIONS.items() if kind is type(convention))
    if isinstance(convention, EDM):
        c.sigma_data = float(convention.sigma_data)
    elif isinstance(convention, DDPM):
        c.schedule, c.prediction, config.noise.shift = convention.schedule, convention.prediction, convention.shift
        low, high = (float(convention.sigmas[i]) for i in (0, -1))
        config.sample.sigma_min, config.sample.sigma_max = max(config.sample.sigma_min, low), min(80.0, high)
        config.noise.sigma_sampler = "discrete"
    else:
        c.time_scale, c.to_data = float(convention.time_scale), convention.to_data


def public_config(kind: str, path: str, config: ConfigDict) -> ConfigDict:
    """The config of a network in a file of public weights; its data are those of `config`."""
    choose(kind, parameters.PUBLIC, "kind of a teacher's weights")
    model, _ = weights.load(path, kind)
    name = known_name(model)
    config.model.name = name
    skipped = ("dtype", "remat", "control")
    fields = {key: value for key, value in fields_of(model).items() if key not in skipped}
    config.model.fields = ConfigDict({key: _plain(value, key, path) for key, value in fields.items()})
    set_convention(config, weights.KINDS[kind].conventions[0])
    config.teacher.kind, config.teacher.path, config.train.steps = kind, path, STEPS
    return config
