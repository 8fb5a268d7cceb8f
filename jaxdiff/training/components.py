"""Objects from the sections of a config: network, convention, noise levels, grid, sampler, optimizers, options."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from typing import Any

import numpy as np
import optax
from flax import linen as nn
from jax import Array
from ml_collections import ConfigDict

from jaxdiff import denoisers, models, noise, solvers
from jaxdiff.conditions import Cond, Conditions
from jaxdiff.conventions import CONVENTIONS, DDPM, EDM, Convention, Flow
from jaxdiff.data import DataSpec
from jaxdiff.denoisers import Denoiser
from jaxdiff.errors import check_ratio, choose, pick
from jaxdiff.methods import Optimizers, Sampling, averaging
from jaxdiff.methods.averaging import Rate
from jaxdiff.methods.optimization import forced
from jaxdiff.training import optim


def plain(options: ConfigDict | Mapping[str, Any]) -> dict[str, Any]:
    """A ConfigDict of options as plain keyword arguments."""
    return dict(options.items())


def options_of(kind: type, section: ConfigDict, name: str) -> Any:
    """A method's options from its section of the config; unknown names are rejected."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    values = {}
    for key, value in section.items():
        field = fields[choose(key, fields, f"option of {name}")]
        nested = field.default_factory
        if dataclasses.is_dataclass(nested):
            value = options_of(nested, value, f"{name}.{key}")
        elif isinstance(value, ConfigDict):
            value = value.to_dict()
        values[key] = value
    return kind(**values)


def convention_of(config: ConfigDict) -> Convention:
    """The convention the network is trained in."""
    c = config.denoiser
    kind = pick(CONVENTIONS, c.kind, "denoiser kind")
    if kind is EDM:
        return EDM(c.sigma_data)
    if kind is DDPM:
        return DDPM(c.schedule, c.prediction, config.noise.shift)
    return Flow(c.time_scale, c.to_data)


def model_of(config: ConfigDict, data: DataSpec, convention: Convention) -> nn.Module:
    """The network; channels, classes, text and augmentation width follow the data unless the config sets them."""
    kind = models.find(config.model.name)
    known = kind.__dataclass_fields__
    fields = plain(config.model.fields)
    if isinstance(fields.get("control"), (Mapping, ConfigDict)):
        fields["control"] = {"convention": convention, **plain(fields["control"])}
    dtype = pick(models.DTYPES, config.model.dtype, "model.dtype")
    follow: dict[str, Any] = {"channels": data.shape[-1], "dtype": dtype}
    follow |= _semantic_fields(data, known, fields)
    if "augment" in data.signals:
        follow["augment_dim"] = data.signals["augment"].shape[0]
    if "remat" in fields:
        raise ValueError(f"rematerialisation is set by model.remat, not by model.fields.remat={fields['remat']!r}")
    if config.model.remat:
        choose(config.model.remat, models.stacks.REMAT, "model.remat")
        if "remat" not in known:
            raise ValueError(f"model {config.model.name!r} has no blocks to rematerialise; set model.remat=''")
        follow["remat"] = config.model.remat
    given = {name: value for name, value in follow.items() if name in known}
    model = models.build(config.model.name, **{**given, **fields})
    if model.channels != data.shape[-1]:
        raise ValueError(
            f"the model takes {model.channels} channels, {data.name} has examples of shape {data.shape}; "
            "omit model.fields.channels to follow the data"
        )
    if "augment" in data.signals and not getattr(model, "augment_dim", 0):
        raise ValueError(
            f"{data.name} is augmented, but this {config.model.name} is not conditioned on the augmentation, which "
            "would show in its samples; use model.name='unet' and leave model.fields.augment_dim out, or set "
            "data.options.augment=0"
        )
    return model


def _semantic_fields(data: DataSpec, known: Iterable[str], fields: Mapping[str, Any]) -> dict[str, int]:
    """Text width if the data have text and the network takes it, else classes; num_classes > 0 selects classes."""
    reads_text = "text_dim" in known and "text" in data.signals and not fields.get("num_classes")
    if reads_text:
        return {"text_dim": data.signals["text"].shape[-1] or 0, "num_classes": 0}
    return {"num_classes": data.num_classes}


def sigmas_of(config: ConfigDict, convention: Convention) -> noise.SigmaSampler:
    """How training draws noise levels."""
    c = config.noise
    if c.sigma_sampler == "discrete":
        if convention.sigmas is None:
            raise ValueError("noise.sigma_sampler='discrete' needs a ddpm schedule; set denoiser.kind='ddpm'")
        return noise.make_levels("discrete", table=convention.sigmas)  # shifted already
    options: dict[str, float] = {}
    if c.sigma_sampler in ("lognormal", "logit_normal"):
        options = {"mean": c.mean, "std": c.std}
    return noise.make_levels(c.sigma_sampler, c.shift, **options)


def average_of(config: ConfigDict) -> Rate:
    """The rate of the average of the parameters."""
    return averaging.make(config.ema.kind, **plain(config.ema.options))


def coupling_of(config: ConfigDict, conditions: Conditions) -> noise.Coupling | None:
    """How the noise of a batch is assigned to its images."""
    c = config.noise
    if c.assignment == "none":
        return None
    options = plain(c.assignment_options)
    known = [name for name in signature(noise.coupling).parameters if name != "kind"]
    for name in options:
        choose(name, known, "option in noise.assignment_options")
    if options.get("within_class") and not conditions.num_classes:
        raise ValueError(
            "noise assigned within_class needs a network conditioned on classes; remove it from "
            "noise.assignment_options"
        )
    return noise.coupling(c.assignment, **options)


def grid_of(config: ConfigDict, convention: Convention) -> Callable[[int], np.ndarray]:
    """Number of timestamps -> the config's grid, with noise levels scaled by noise.shift as in training."""
    c = config.sample
    check_ratio(config.noise.shift)
    low, high = c.sigma_min * config.noise.shift, c.sigma_max * config.noise.shift
    rho = c.rho if c.grid == "polynomial" else None
    table = None
    if c.grid == "discrete":
        table = convention.sigmas
        if table is None:
            raise ValueError("sample.grid='discrete' needs a ddpm schedule; set denoiser.kind='ddpm'")
        low, high = max(low, table[0]), min(high, table[-1])
    return lambda n: solvers.grid(n, low, high, c.grid, rho, table)


def with_nfe(config: ConfigDict, nfe: int) -> ConfigDict:
    """The config with as many timestamps as `nfe` network evaluations per trajectory allow; 0 keeps it."""
    if not nfe:
        return config
    changed = config.copy_and_resolve_references()
    c = changed.sample
    solver = solvers.make(c.solver, **plain(c.options))
    with changed.unlocked():
        c.timestamps = solver.timestamps(nfe, c.afs, c.final_denoise)
    return changed


def sampling_of(
    config: ConfigDict, convention: Convention, solver: solvers.Solver, null: Cond, control_null: Cond
) -> Sampling:
    """How samples are drawn: the config's solver, grid and guidance."""
    c = config.sample
    grid = grid_of(config, convention)
    sigmas = grid(c.timestamps)

    def solve(denoise: Denoiser, unit: Array, cond: Cond = None, key: Array | None = None) -> Array:
        if null and (c.guidance != 1.0 or c.control_guidance != 1.0):
            scales = {"control_scale": c.control_guidance, "control_null": control_null}
            denoise = denoisers.guided(denoise, c.guidance, null, **scales)
        start = sigmas[0] * unit
        return solvers.solve(denoise, start, sigmas, solver, cond, afs=c.afs, key=key, final_denoise=c.final_denoise)

    return Sampling(solve, grid, c.timestamps, c.afs, c.guidance, c.sigma_max)


def optimizers_of(config: ConfigDict, model: nn.Module) -> Optimizers:
    """The optimizer with its schedule, and the same with constant rates and the schedule as a factor.

    Networks that keep their weights normalized (`model.force`) get optimizers that do so.
    """
    c, size = config.optim, config.data.batch_size
    schedule = {"warmup_images": c.warmup_images, "decay": c.decay, "decay_images": c.decay_images}
    options = plain(c.options)

    def constant(rate: float | None) -> optax.GradientTransformation:
        rate = c.learning_rate if rate is None else rate
        return optim.make(c.name, rate, size, clip=c.clip, options=options)

    scheduled = optim.make(c.name, c.learning_rate, size, clip=c.clip, **schedule, options=options)
    made = Optimizers(scheduled, constant, optim.schedule(1.0, size, **schedule))
    force = getattr(model, "force", None)
    return made if force is None else forced(made, force)
