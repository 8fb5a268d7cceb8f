"""From a config to the objects of a run. Everything that can be wrong with a config is found here, before any work."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxdiff import denoisers, models, noise, solvers
from jaxdiff.data import Dataset, load
from jaxdiff.denoisers import Cond, Denoiser
from jaxdiff.errors import pick
from jaxdiff.methods import METHODS, Method, ema
from jaxdiff.training import optim, sharding


class Job(NamedTuple):
    """A run, ready to start."""

    config: ConfigDict
    dataset: Dataset
    mesh: Mesh
    model: Any
    method: Method
    null: Cond
    solver: solvers.Solver

    @property
    def nfe(self) -> int:
        """Network evaluations per sample; guidance doubles them."""
        c = self.config.sample
        once = self.solver.nfe(c.steps, to_zero=c.to_zero)
        return once * (2 if c.guidance != 1.0 and self.null else 1)


def build(config: ConfigDict, devices: Any = None) -> Job:
    """All objects of a run from its config."""
    dataset = load(config.data.source, seed=config.seed, **_options(config.data.options))
    mesh = sharding.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor, devices)
    sharding.check_batch(config.data.batch_size, mesh, config.optim.accumulate)
    pick({"stop": 0, "skip": 0}, config.train.on_nonfinite, "train.on_nonfinite")
    model = build_model(config, dataset)
    if not getattr(model, "num_classes", 0):
        dataset = unlabelled(dataset)
    null: Cond = {"label": model.num_classes} if getattr(model, "num_classes", 0) else None
    solver = solvers.make(config.sample.solver, **_options(config.sample.options))
    method = pick(BUILDERS, config.method.name, "method")(config, model, null, solver)
    return Job(config, dataset, mesh, model, method, null, solver)


def reference_data(config: ConfigDict) -> Dataset:
    """The data as evaluation compares with them: in stored order, not mirrored."""
    options = {**_options(config.data.options), "shuffle": False, "flip": False}
    return load(config.data.source, seed=config.seed, **options)


def unlabelled(dataset: Dataset) -> Dataset:
    """The dataset as an unconditional model sees it, so that model.fields.num_classes = 0 is all it takes."""

    def fetch(positions: range, executor: Executor | None) -> dict[str, Any]:
        return {key: value for key, value in dataset.fetch(positions, executor).items() if key != "label"}

    return dataclasses.replace(dataset, fetch=fetch, num_classes=0, class_names=()) if dataset.num_classes else dataset


def build_model(config: ConfigDict, dataset: Dataset) -> Any:
    """The network; classes and channels follow the data unless the config says otherwise."""
    fields = _options(config.model.fields)
    dtype = pick({"float32": jnp.float32, "bfloat16": jnp.bfloat16}, config.model.dtype, "model.dtype")
    kind = pick(models.MODELS, config.model.name, "model")
    follow = {"channels": dataset.image_shape[-1], "num_classes": dataset.num_classes, "dtype": dtype}
    known = {name: value for name, value in follow.items() if name in kind.__dataclass_fields__}
    model = models.build(config.model.name, **{**known, **fields})
    if model.channels != dataset.image_shape[-1]:
        raise ValueError(
            f"the model takes {model.channels} channels, {dataset.name} has images of shape {dataset.image_shape}; "
            "leave model.fields.channels out to follow the data"
        )
    return model


def build_wrapper(config: ConfigDict) -> Callable[..., Denoiser]:
    """The convention the network is trained in."""
    c = config.denoiser
    kinds: dict[str, Callable[..., Denoiser]] = {
        "edm": partial(denoisers.edm, sigma_data=c.sigma_data),
        "ddpm": lambda network: denoisers.ddpm(network, abar(config), c.prediction),
        "flow": denoisers.flow,
    }
    if c.kind == "ddpm":
        abar(config)
    return pick(kinds, c.kind, "denoiser kind")


def abar(config: ConfigDict) -> Any:
    """The table of a ddpm schedule."""
    tables = {
        "linear": denoisers.linear_abar,
        "sqrt_linear": denoisers.sqrt_linear_abar,
        "cosine": denoisers.cosine_abar,
    }
    return pick(tables, config.denoiser.schedule, "ddpm schedule")()


def build_levels(config: ConfigDict) -> noise.Levels:
    """How training draws noise levels."""
    options: dict[str, Any] = {}
    if config.noise.levels in ("lognormal", "logit_normal"):
        options = {"mean": config.noise.mean, "std": config.noise.std}
    elif config.noise.levels == "discrete":
        options = {"table": denoisers.sigma_table(abar(config))}
    return noise.make_levels(config.noise.levels, config.noise.shift, **options)


def build_weight(config: ConfigDict) -> noise.Weight:
    options = {"sigma_data": config.denoiser.sigma_data} if config.noise.weight == "edm" else {}
    return noise.make_weight(config.noise.weight, **options)


def build_sampler(config: ConfigDict, null: Cond, solver: solvers.Solver) -> Callable[..., Array]:
    """(denoise, unit noise, cond, key) -> x0 with the config's solver, grid and guidance."""
    c = config.sample
    table = denoisers.sigma_table(abar(config)) if c.grid == "discrete" else None
    low, high = (
        (c.sigma_min, c.sigma_max) if table is None else (max(c.sigma_min, table[0]), min(c.sigma_max, table[-1]))
    )
    sigmas = solvers.grid(c.steps, low, high, c.grid, c.rho if c.grid == "polynomial" else None, table)

    def sampler(denoise: Denoiser, unit: Array, cond: Cond = None, key: Array | None = None) -> Array:
        if c.guidance != 1.0 and null:
            denoise = denoisers.guided(denoise, c.guidance, null)
        return solvers.solve(denoise, sigmas[0] * unit, sigmas, solver, cond, key=key, to_zero=c.to_zero)

    return sampler


def build_optimizer(config: ConfigDict) -> Any:
    c = config.optim
    return optim.make(
        c.name,
        c.learning_rate,
        config.data.batch_size,
        clip=c.clip,
        warmup_images=c.warmup_images,
        decay=c.decay,
        decay_images=c.decay_images,
        options=_options(c.options),
    )


def _denoise(config: ConfigDict, model: Any, null: Cond, solver: solvers.Solver) -> Method:
    return METHODS["denoise"](
        model,
        build_optimizer(config),
        build_sampler(config, null, solver),
        wrapper=build_wrapper(config),
        levels=build_levels(config),
        weight=build_weight(config),
        decay=ema.make(config.ema.kind, **_options(config.ema.options)),
        null=null,
        drop=config.cond.drop if null else 0.0,
        parts=config.optim.accumulate,
    )


BUILDERS: dict[str, Callable[..., Method]] = {"denoise": _denoise}


def _options(options: Any) -> dict[str, Any]:
    """A ConfigDict of options as plain keyword arguments."""
    return dict(options.items())
