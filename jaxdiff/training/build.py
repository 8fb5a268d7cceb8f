"""From a config to the objects of a run. Everything that can be wrong with a config is found here, before any work."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding
from ml_collections import ConfigDict

from jaxdiff import denoisers, models, noise, solvers, weights
from jaxdiff.data import Dataset, load
from jaxdiff.denoisers import Cond, Denoiser
from jaxdiff.errors import check_ratio, pick
from jaxdiff.evaluation.lpips import LPIPS
from jaxdiff.methods import METHODS, Method, ema
from jaxdiff.methods.sfd import teacher_model
from jaxdiff.training import conditions, decoding, optim, sharding, teachers
from jaxdiff.training.teachers import Frozen

IMAGELESS = ("blank", "prompts")  # data sources that samples cannot be compared with
CHAIN = ("steps", "scheme", "step_eps", "step_z", "step_x", "half", "cancel", "cancel_initial", "clip_z")  # of EMD
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


class Job(NamedTuple):
    """A run, ready to start."""

    config: ConfigDict
    dataset: Dataset
    mesh: Mesh
    model: Any
    method: Method
    null: Cond
    solver: solvers.Solver
    frozen: Frozen | None = None  # what the method's init takes from outside
    decode: Callable[[Any], Any] | None = None  # of latents to images, on the host

    @property
    def nfe(self) -> int:
        """Network evaluations per sample; guidance doubles them, or makes them threefold with a scale of control."""
        c = self.config.sample
        once = self.solver.nfe(c.steps, c.afs, c.to_zero)
        return once * (3 if c.control_guidance != 1.0 else 2 if c.guidance != 1.0 and self.null else 1)


def build(config: ConfigDict, devices: Any = None) -> Job:
    """All objects of a run from its config."""
    dataset = load(config.data.source, seed=config.seed, **_options(config.data.options))
    dataset = captioned(config, dataset)
    mesh = sharding.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor, devices)
    sharding.check_batch(config.data.batch_size, mesh, config.optim.accumulate)
    pick({"stop": 0, "skip": 0}, config.train.on_nonfinite, "train.on_nonfinite")
    pick({"run": 0, **teachers.CONVENTIONS}, config.train.init_kind, "train.init_kind")
    if config.data.source in IMAGELESS and config.train.eval_every:
        raise ValueError(
            f"data.source={config.data.source!r} has nothing to compare samples with; set train.eval_every=0"
        )
    if config.noise.assignment != "none" and config.method.name not in PAIRED:
        raise ValueError(
            f"noise.assignment={config.noise.assignment!r} pairs noise with data, which method {config.method.name!r} "
            f"does not diffuse; it is for {', '.join(PAIRED)}"
        )
    model = build_model(config, dataset)
    if not getattr(model, "num_classes", 0):
        dataset = unlabelled(dataset)
    dataset = conditions.with_controls(config, model, dataset)
    pad = conditions.padding_of(config, dataset)
    null = conditions.null_of(config, model, dataset, pad)
    solver = solvers.make(config.sample.solver, **_options(config.sample.options))
    method, frozen = pick(BUILDERS, config.method.name, "method")(config, model, dataset, null, solver, mesh)
    if pad is not None:
        method = conditions.padded(method, pad)
    if config.teacher.offload and frozen is not None:
        sharding.check_host_memory(mesh.devices.flat[0])
        method = teachers.offloaded(method)
    return Job(config, dataset, mesh, model, method, null, solver, frozen, decoding.decoder(config, dataset))


def reference_data(config: ConfigDict) -> Dataset:
    """The data as evaluation compares with them: in stored order, not mirrored."""
    options = {**_options(config.data.options), "shuffle": False, "flip": False}
    return load(config.data.source, seed=config.seed, **options)


def unlabelled(dataset: Dataset) -> Dataset:
    """The dataset as an unconditional model sees it, so that model.fields.num_classes = 0 is all it takes."""

    def fetch(positions: range, executor: Executor | None) -> dict[str, Any]:
        return {key: value for key, value in dataset.fetch(positions, executor).items() if key != "label"}

    return dataclasses.replace(dataset, fetch=fetch, num_classes=0, class_names=()) if dataset.num_classes else dataset


def captioned(config: ConfigDict, dataset: Dataset) -> Dataset:
    """The dataset with those embeddings of its captions that the model takes, so that one text serves every model."""
    if dataset.encode is None:
        return dataset
    kind = pick(models.MODELS, config.model.name, "model")
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    takes = {**defaults, **_options(config.model.fields)}
    if config.model.fields.get("num_classes"):
        takes |= {"text_dim": 0, "pooled_dim": 0}  # asked to be told the class
    needs = {"text": "text_dim", "text_mask": "text_dim", "pooled": "pooled_dim"}
    gone = [name for name, field in needs.items() if name in dataset.null and not takes.get(field)]

    def fetch(positions: range, executor: Executor | None) -> dict[str, Any]:
        return {key: value for key, value in dataset.fetch(positions, executor).items() if key not in gone}

    null = {name: value for name, value in dataset.null.items() if name not in gone}
    return dataclasses.replace(dataset, fetch=fetch, null=null, encode=dataset.encode if null else None)


def build_model(config: ConfigDict, dataset: Dataset) -> Any:
    """The network; classes and channels follow the data unless the config says otherwise."""
    fields = _options(config.model.fields)
    if fields.get("control") is not None:
        convention = {"time": config.denoiser.kind, "sigma_data": config.denoiser.sigma_data}
        fields["control"] = {**convention, **_options(fields["control"])}
    dtype = pick(DTYPES, config.model.dtype, "model.dtype")
    kind = pick(models.MODELS, config.model.name, "model")
    texts = "text" in dataset.null and "text_dim" in kind.__dataclass_fields__  # then classes are left to the texts
    classes = 0 if texts else dataset.num_classes
    follow = {"channels": dataset.image_shape[-1], "num_classes": classes, "dtype": dtype}
    if config.model.remat:
        pick(models.layers.REMAT, config.model.remat, "model.remat")
        if "remat" not in kind.__dataclass_fields__:
            raise ValueError(f"model {config.model.name!r} has no blocks to rematerialise; set model.remat=''")
        follow["remat"] = config.model.remat
    known = {name: value for name, value in follow.items() if name in kind.__dataclass_fields__}
    if "text" in dataset.null and "text_dim" in kind.__dataclass_fields__:
        known["text_dim"] = dataset.null["text"].shape[-1]
    model = models.build(config.model.name, **{**known, **fields})
    if model.channels != dataset.image_shape[-1]:
        raise ValueError(
            f"the model takes {model.channels} channels, {dataset.name} has images of shape {dataset.image_shape}; "
            "leave model.fields.channels out to follow the data"
        )
    if getattr(model, "num_classes", 0) and not dataset.num_classes:
        raise ValueError(
            f"the model knows {model.num_classes} classes, {dataset.name} has none; set model.fields.num_classes=0, or "
            "data.options.num_classes for data.source='blank'"
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
    """The table of a ddpm schedule, for images noise.shift times as large: a timestep keeps its meaning."""
    tables = {
        "linear": denoisers.linear_abar,
        "sqrt_linear": denoisers.sqrt_linear_abar,
        "cosine": denoisers.cosine_abar,
    }
    return denoisers.rescaled_abar(pick(tables, config.denoiser.schedule, "ddpm schedule")(), config.noise.shift)


def build_levels(config: ConfigDict) -> noise.Levels:
    """How training draws noise levels."""
    options: dict[str, Any] = {}
    if config.noise.levels in ("lognormal", "logit_normal"):
        options = {"mean": config.noise.mean, "std": config.noise.std}
    elif config.noise.levels == "discrete":
        return noise.make_levels("discrete", table=denoisers.sigma_table(abar(config)))  # which is shifted
    return noise.make_levels(config.noise.levels, config.noise.shift, **options)


def build_weight(config: ConfigDict) -> noise.Weight:
    options = {"sigma_data": config.denoiser.sigma_data} if config.noise.weight == "edm" else {}
    return noise.make_weight(config.noise.weight, **options)


def build_coupling(config: ConfigDict, dataset: Dataset, mesh: Mesh) -> noise.Coupling | None:
    """How the noises of a batch are paired with its images; what cannot be paired is refused here."""
    if config.noise.assignment == "none":
        return None
    options = _options(config.noise.assignment_options)
    given: dict[str, Any] = {
        "kind": config.noise.assignment,
        "sharding": NamedSharding(mesh, sharding.BATCH),
        "batch_size": config.data.batch_size,
    }
    known = [name for name in signature(noise.coupling).parameters if name not in given]
    if unknown := sorted(set(options) - set(known)):
        raise ValueError(f"noise.assignment_options may hold {', '.join(known)}; got {', '.join(unknown)}")
    if options.get("within_class") and not dataset.num_classes:
        raise ValueError(
            "noise assigned within_class needs labelled data; leave that option out of noise.assignment_options"
        )
    return noise.coupling(**given, **options)


def build_grid(config: ConfigDict) -> Callable[[int], Any]:
    """Number of timestamps -> the config's grid of so many, its levels times noise.shift as those of training are."""
    c = config.sample
    table = denoisers.sigma_table(abar(config)) if c.grid == "discrete" else None
    check_ratio(config.noise.shift)
    low, high = c.sigma_min * config.noise.shift, c.sigma_max * config.noise.shift
    if table is not None:
        low, high = max(low, table[0]), min(high, table[-1])
    return lambda n: solvers.grid(n, low, high, c.grid, c.rho if c.grid == "polynomial" else None, table)


def build_sampler(config: ConfigDict, null: Cond, solver: solvers.Solver) -> Callable[..., Array]:
    """(denoise, unit noise, cond, key) -> x0 with the config's solver, grid and guidance."""
    c = config.sample
    sigmas = build_grid(config)(c.steps)

    def sampler(denoise: Denoiser, unit: Array, cond: Cond = None, key: Array | None = None) -> Array:
        if null and (c.guidance != 1.0 or c.control_guidance != 1.0):
            denoise = denoisers.guided(denoise, c.guidance, null, control_scale=c.control_guidance)
        start = sigmas[0] * unit
        return solvers.solve(denoise, start, sigmas, solver, cond, afs=c.afs, key=key, to_zero=c.to_zero)

    return sampler


def build_optimizer(config: ConfigDict) -> Any:
    c = config.optim
    return optim.make(
        c.name, c.learning_rate, config.data.batch_size, clip=c.clip, **_schedule(config), options=_options(c.options)
    )


def build_rate(config: ConfigDict, learning_rate: float | None = None) -> tuple[Any, Callable[[Any], Any]]:
    """For methods of several updates an iteration: a constant-rate optimizer, and its factor by iteration."""
    c = config.optim
    peak = c.learning_rate if learning_rate is None else learning_rate
    plain = optim.make(c.name, peak, config.data.batch_size, clip=c.clip, options=_options(c.options))
    return plain, optim.schedule(1.0, config.data.batch_size, **_schedule(config))


def _schedule(config: ConfigDict) -> dict[str, Any]:
    c = config.optim
    return {"warmup_images": c.warmup_images, "decay": c.decay, "decay_images": c.decay_images}


def _denoise(
    config: ConfigDict, model: Any, dataset: Dataset, null: Cond, solver: solvers.Solver, mesh: Mesh
) -> tuple[Method, None]:
    method = METHODS["denoise"](
        model,
        build_optimizer(config),
        build_sampler(config, null, solver),
        wrapper=build_wrapper(config),
        levels=build_levels(config),
        weight=build_weight(config),
        decay=ema.make(config.ema.kind, **_options(config.ema.options)),
        null=null,
        drop=config.cond.drop if null else 0.0,
        control_drop=config.cond.control_drop,
        couple=build_coupling(config, dataset, mesh),
        parts=config.optim.accumulate,
    )
    return method, None


def _consistency(
    config: ConfigDict, model: Any, dataset: Dataset, null: Cond, solver: solvers.Solver, mesh: Mesh
) -> tuple[Method, Frozen | None]:
    c, s = config.consistency, config.sample
    if s.solver != "renoise" or not s.to_zero or s.afs or s.guidance != 1.0:
        raise ValueError(
            f"a consistency model is sampled by sample.solver='renoise' with sample.to_zero=True, afs=False and "
            f"guidance=1.0, got {s.solver!r}, {s.to_zero}, {s.afs} and {s.guidance}"
        )
    if s.sigma_min < c.sigma_min or s.sigma_max > c.sigma_max:
        raise ValueError(
            f"a consistency model knows levels from consistency.sigma_min={c.sigma_min} to sigma_max={c.sigma_max}; "
            f"sample.sigma_min={s.sigma_min} and sample.sigma_max={s.sigma_max} must lie between"
        )
    if config.noise.levels != "lognormal" or config.noise.shift != 1.0:
        raise ValueError(
            f"consistency models draw lognormal levels between ends of their own, got noise.shift={config.noise.shift} "
            f"and noise.levels={config.noise.levels!r}; for larger images scale consistency.sigma_max and noise.mean"
        )
    teacher = teachers.make(config, model, dataset, build_model) if c.distil else None
    method = METHODS["consistency"](
        model,
        build_optimizer(config),
        build_sampler(config, null, solver),
        total=config.train.steps,
        wrapper=build_wrapper(config),
        teacher=teacher.denoiser if teacher else None,
        null=null,
        mean=config.noise.mean,
        std=config.noise.std,
        decay=ema.make(config.ema.kind, **_options(config.ema.options)),
        couple=build_coupling(config, dataset, mesh),
        parts=config.optim.accumulate,
        **_options(c),
    )
    return method, teachers.together(teacher=teacher.frozen) if teacher else None


def _sfd(
    config: ConfigDict, model: Any, dataset: Dataset, null: Cond, solver: solvers.Solver, mesh: Mesh
) -> tuple[Method, Frozen]:
    c, s = config.sfd, config.sample
    if s.solver != "euler" or s.to_zero:
        raise ValueError(
            f"an SFD student is sampled by Euler steps on the grid it was trained for: set sample.solver='euler' and "
            f"sample.to_zero=False, got {s.solver!r} and {s.to_zero}"
        )
    if s.steps - 1 - s.afs not in c.nfe:
        raise ValueError(
            f"this student is made for {', '.join(map(str, c.nfe))} evaluations (sfd.nfe), but sample.steps={s.steps} "
            f"timestamps are {s.steps - 1 - s.afs}; set sample.steps={max(c.nfe, default=1) + 1 + s.afs}"
        )
    if c.guidance != 1.0 and s.guidance != 1.0:
        raise ValueError(
            f"the student takes over sfd.guidance={c.guidance}, so sample.guidance={s.guidance} would guide it twice; "
            "set one of them to 1"
        )
    teacher = teachers.make(config, teacher_model(model, c.teacher_step), dataset, build_model)
    perceptual, lpips = build_lpips(config, dataset)
    optimizer, rate = build_rate(config)
    method = METHODS["sfd"](
        model,
        optimizer,
        nfe=c.nfe,
        afs=s.afs,
        grid=build_grid(config),
        substeps=c.substeps,
        solver=solvers.make(c.solver, **_options(c.solver_options)),
        teacher=teacher.denoiser,
        teacher_afs=c.teacher_afs,
        teacher_step=c.teacher_step,
        wrapper=build_wrapper(config),
        condition=c.condition,
        loss=c.loss,
        perceptual=perceptual,
        dropout=c.dropout,
        guidance=c.guidance,
        sample_guidance=s.guidance,
        null=null,
        sample_nfe=s.steps - 1 - s.afs,
        rate=rate,
        decay=ema.make(config.ema.kind, **_options(config.ema.options)) if c.average else None,
        parts=config.optim.accumulate,
        place=partial(sharding.along_batch, mesh=mesh),
    )
    return method, teachers.together(teacher=teacher.frozen, lpips=lpips)


def _emd(
    config: ConfigDict, model: Any, dataset: Dataset, null: Cond, solver: solvers.Solver, mesh: Mesh
) -> tuple[Method, Frozen]:
    c, s = config.emd, config.sample
    if s.solver != "euler" or s.steps != 1 or not s.to_zero or s.afs:
        raise ValueError(
            f"an EMD generator is one step from sample.sigma_max, its level sigma_star: set sample.solver='euler', "
            f"sample.steps=1, sample.to_zero=True and sample.afs=False, got {s.solver!r}, {s.steps}, {s.to_zero} and "
            f"{s.afs}"
        )
    if s.guidance != 1.0:
        raise ValueError(
            f"the generator takes over emd.guidance={c.guidance}; sample.guidance={s.guidance} would guide it twice: "
            "set it to 1"
        )
    teacher = teachers.make(config, model, dataset, build_model)
    optimizer, rate = build_rate(config)
    levels = build_levels(config)
    chains = noise.make_levels(c.levels, config.noise.shift, **_options(c.level_options)) if c.levels else levels
    method = METHODS["emd"](
        model,
        optimizer,
        build_rate(config, c.score_rate)[0],
        sigma_star=s.sigma_max,
        input_scale=c.input_scale,
        wrapper=build_wrapper(config),
        teacher=teacher.denoiser,
        guidance=c.guidance,
        null=null,
        levels=noise.at_least(chains, c.sigma_min) if c.sigma_min else chains,
        weight=noise.make_weight(c.weight),
        score_levels=levels,
        score_weight=build_weight(config),
        score_updates=c.score_updates,
        dropout=c.dropout,
        rate=rate,
        decay=ema.make(config.ema.kind, **_options(config.ema.options)),
        parts=config.optim.accumulate,
        place=partial(sharding.along_batch, mesh=mesh),
        chain_dtype=pick(DTYPES, c.chain_dtype, "emd.chain_dtype") if c.chain_dtype else None,
        **{name: c[name] for name in CHAIN},
    )
    return method, teachers.together(teacher=teacher.frozen)


def build_lpips(config: ConfigDict, dataset: Dataset) -> tuple[Callable[..., Any] | None, Frozen | None]:
    """The LPIPS network of a loss that names it, and its weights."""
    c = config.sfd.lpips
    if "lpips" not in config.sfd.loss.split("+"):
        return None, None
    net = LPIPS(net=c.net, pool=c.pool, resize=c.resize, dtype=DTYPES[config.model.dtype])
    example = jnp.zeros((1, *dataset.image_shape))
    shapes = jax.eval_shape(lambda: net.init(jax.random.key(0), example, example)["params"])

    def load() -> Any:
        if not c.weights:
            raise ValueError(
                f"sfd.loss={config.sfd.loss!r} needs the weights of LPIPS: --config.sfd.lpips.weights=FILE "
                "(docs/weights.md tells where they come from); without them use --config.sfd.loss=l1"
            )
        found, params = weights.load(c.weights, "lpips")
        if found.net != c.net:
            raise ValueError(f"{c.weights} holds the {found.net} network; set sfd.lpips.net={found.net!r}")
        return params

    def distance(params: Any, a: Array, b: Array) -> Any:
        if c.as_unit:
            a, b = 2 * a - 1, 2 * b - 1
        return net.apply({"params": params}, a, b)

    return distance, Frozen(shapes, load)


BUILDERS: dict[str, Callable[..., tuple[Method, Frozen | None]]] = {
    "consistency": _consistency,
    "denoise": _denoise,
    "emd": _emd,
    "sfd": _sfd,
}
PAIRED = ("consistency", "denoise")  # methods that diffuse data, so that their noise can be assigned
# fields of `sample` that belong to a student as much as its parameters
TRAINED_FOR = {
    "consistency": (),
    "denoise": (),
    "emd": ("sigma_max",),
    "sfd": ("grid", "rho", "sigma_min", "sigma_max", "afs"),
}


def check_sampling(config: ConfigDict, made: ConfigDict) -> None:
    """A student is sampled as it was trained: `made` is the config of its run."""
    for name in TRAINED_FOR[made.method.name]:
        if config.sample[name] != made.sample[name]:
            raise ValueError(
                f"this student is sampled as it was trained: leave sample.{name} at {made.sample[name]}, "
                f"got {config.sample[name]}"
            )


def _options(options: Any) -> dict[str, Any]:
    """A ConfigDict of options as plain keyword arguments."""
    return dict(options.items())
