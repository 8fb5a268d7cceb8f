"""Where a distillation's teacher comes from: config.teacher.kind and config.teacher.path.

run        a workdir of `jaxdiff train`: its exported parameters
edm, ...   public weights of that kind of jaxdiff.weights: an .npz or .safetensors file
analytic   the exact denoiser of a `mixture` data source; the student then starts untrained
fresh      an untrained network, to try a config without a teacher

The teacher has the student's architecture; a step condition only where it is itself such a student.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from jaxdiff import denoisers, weights
from jaxdiff.data import Dataset, mixture_components
from jaxdiff.denoisers import Denoiser
from jaxdiff.errors import pick
from jaxdiff.methods import Method
from jaxdiff.training import export
from jaxdiff.trees import by_name, misfits

# may differ from the student
PRIVATE = ("parent", "name", "dtype", "remat", "loop", "dropout", "step_embed", "mask_buckets")
# public weights: their denoiser.kind
CONVENTIONS = {
    "edm": "edm",
    "dit": "ddpm",
    "mdt": "ddpm",
    "pixart": "ddpm",
    "sd3": "flow",
    "sd_unet": "ddpm",
    "sdxl_unet": "ddpm",
}


class Frozen(NamedTuple):
    """Arrays from outside that a method's state holds: their shapes, and how to read them."""

    shapes: Any
    load: Callable[[], Any]


def together(**parts: Frozen | None) -> Frozen:
    """Several under their names, those that are None left out."""
    held = {name: part for name, part in parts.items() if part is not None}
    shapes = {name: part.shapes for name, part in held.items()}
    return Frozen(shapes, lambda: {name: part.load() for name, part in held.items()})


class Teacher(NamedTuple):
    """`denoiser(params)`, or None for the student's own architecture; and the parameters."""

    denoiser: Callable[[Any], Denoiser] | None
    frozen: Frozen


def make(config: ConfigDict, model: Any, dataset: Dataset, build_model: Callable[..., Any]) -> Teacher:
    """The teacher of `config.teacher`; nothing is read yet."""
    kind = config.teacher.kind
    pick({"run": 0, "analytic": 0, "fresh": 0, **CONVENTIONS}, kind, "teacher kind")
    if kind == "analytic":
        return Teacher(_analytic(config), Frozen({}, dict))
    path = Path(config.teacher.path).expanduser() if config.teacher.path else None
    if path is None and kind != "fresh":
        raise ValueError(
            "a distillation needs a teacher: --config.teacher.path=FOLDER of a run (make one with: jaxdiff train "
            "--config=configs/digits.py --workdir=runs/digits), or a weights file with --config.teacher.kind=edm"
        )
    wanted = CONVENTIONS.get(kind, config.denoiser.kind)
    if config.denoiser.kind != wanted:
        raise ValueError(f"weights of kind {kind!r} need denoiser.kind={wanted!r}, got {config.denoiser.kind!r}")
    if kind in CONVENTIONS and wanted == "ddpm" and config.noise.shift != 1.0:
        raise ValueError(
            f"weights of kind {kind!r} know their own schedule: set noise.shift=1, got {config.noise.shift}"
        )
    shapes = parameter_shapes(model, dataset)

    def load() -> Any:
        if path is None:
            return jax.device_get(_initialise(model, dataset, config.seed))
        if kind == "run":
            return _from_run(path, shapes, model, dataset, build_model, config)
        return public(path, kind, model, shapes)

    return Teacher(None, Frozen(shapes, load))


def offloaded(method: Method) -> Method:
    """The method with what its state holds frozen in the host's memory, brought to the devices where it is used."""

    def near(state: Any) -> Any:
        return state.replace(frozen=jax.device_put(state.frozen, jax.memory.Space.Device))

    def step(state: Any, batch: Any, key: Any) -> Any:
        new, metrics = method.step(near(state), batch, key)
        return new.replace(frozen=state.frozen), metrics

    def correct(state: Any, *arguments: Any, **how: Any) -> Any:
        assert method.correct is not None
        return method.correct(near(state), *arguments, **how)

    return method._replace(step=step, correct=correct if method.correct else None)


def public(path: Path, kind: str, model: Any, shapes: Any) -> Any:
    """The parameters of a file of public weights, which must be those of `model`."""
    loaded, params = read_public(path, kind, model)
    wrong = misfits(by_name(params), by_name(shapes))
    if wrong:
        raise ValueError(f"{path} ({type(loaded).__name__}) is not the network of model.fields: {wrong}")
    return params


def read_public(path: Path, kind: str, model: Any) -> tuple[Any, Any]:
    """Public weights: their network, laid out as `model` where the file does not tell, and its parameters."""
    untold = ("heads", "head_width", "scan")  # what a file cannot tell, or how its blocks are laid out
    known = weights.KINDS[kind].model.__dataclass_fields__
    own = {name: getattr(model, name) for name in untold if name in known and hasattr(model, name)}
    return weights.load(path, kind, **own)


def parameter_shapes(model: Any, dataset: Dataset) -> Any:
    """Shapes of the model's parameters; nothing is computed."""
    return jax.eval_shape(lambda: _initialise(model, dataset, 0))


def _initialise(model: Any, dataset: Dataset, seed: int) -> Any:
    image = jnp.zeros((1, *dataset.image_shape))
    cond: dict[str, Any] = {"label": jnp.zeros(1, jnp.int32)} if getattr(model, "num_classes", 0) else {}
    cond |= {name: jnp.zeros((1, *value.shape), value.dtype) for name, value in dataset.null.items()}
    if getattr(model, "step_embed", ""):
        cond["step"] = jnp.zeros(1)
    return jax.jit(model.init)(jax.random.key(seed), image, jnp.ones(1), cond or None)["params"]


def _analytic(config: ConfigDict) -> Callable[[Any], Denoiser]:
    if config.data.source != "mixture":
        raise ValueError(
            f"teacher.kind='analytic' knows the data source 'mixture' only, got {config.data.source!r}; "
            "train a teacher and give teacher.kind='run', teacher.path=its workdir"
        )
    options = {k: v for k, v in config.data.options.items() if k in ("preset", "dim", "std", "means", "weights")}
    exact = denoisers.gaussian_mixture(*mixture_components(**options))
    return lambda params: exact


def _from_run(
    path: Path, shapes: Any, model: Any, dataset: Dataset, build_model: Callable[..., Any], config: ConfigDict
) -> Any:
    """The exported parameters of a run whose network is the student's, apart from fields that change no weights."""
    if not path.exists():
        raise FileNotFoundError(
            f"no teacher at {path.absolute()}: train one, for example with jaxdiff train --config=configs/digits.py "
            f"--workdir={path}, and give that folder as --config.teacher.path"
        )
    known = export.read_config(path) if path.is_dir() else config
    theirs = build_model(known, dataset) if path.is_dir() else model
    for name, value in known.denoiser.items():
        if config.denoiser[name] != value:
            raise ValueError(
                f"the student must have the teacher's convention: denoiser.{name} is {config.denoiser[name]!r} here "
                f"and {value!r} in {path}"
            )
    if known.denoiser.kind == "ddpm" and config.noise.shift != known.noise.shift:
        raise ValueError(
            f"the student must have the teacher's schedule: noise.shift is {config.noise.shift} here and "
            f"{known.noise.shift} in {path}"
        )
    if bool(getattr(theirs, "step_embed", "")) != bool(getattr(model, "step_embed", "")):
        raise ValueError(
            f"the teacher {path} is a student with a step condition: set model.fields.step_embed='zero' and "
            "sfd.teacher_step to the number of timestamps it shall walk"
            if getattr(theirs, "step_embed", "")
            else f"sfd.teacher_step is set, but the teacher {path} has no step condition; set it to 0"
        )
    for field in dataclasses.fields(model):
        if field.name not in PRIVATE and getattr(model, field.name) != getattr(theirs, field.name, None):
            raise ValueError(
                f"the student must have the teacher's architecture: model field {field.name} is "
                f"{getattr(model, field.name)} here and {getattr(theirs, field.name, 'absent')} in {path}"
            )
    if known.method.name == "sfd" and path.is_dir():
        _check_walk(config, known, path)
    step = jax.ShapeDtypeStruct((), np.int32)
    return jax.device_get(export.read(path, {"step": step, "ema": shapes})["ema"])


def _check_walk(config: ConfigDict, known: ConfigDict, path: Path) -> None:
    """A teacher that is itself a student must walk a grid it was made for."""
    c, sample = config.sfd, known.sample
    asked = sorted((nfe + config.sample.afs) * c.substeps - c.teacher_afs for nfe in c.nfe)
    made = tuple(known.sfd.nfe)
    wrong = [f"{', '.join(map(str, asked))} evaluations, not one of {made}"] if set(asked) - set(made) else []
    wrong += [
        f"sample.{name}={config.sample[name]}, not {sample[name]}"
        for name in ("grid", "rho", "sigma_min", "sigma_max")
        if config.sample[name] != sample[name]
    ]
    wrong += [f"sfd.teacher_afs={c.teacher_afs}, not {sample.afs}"] if c.teacher_afs != sample.afs else []
    wrong += [f"sfd.solver={c.solver!r}, not 'euler'"] if c.solver != "euler" else []
    if wrong:
        raise ValueError(f"the teacher {path} is a student that was not made for this walk: {'; '.join(wrong)}")
