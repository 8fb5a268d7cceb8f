"""From a config and a description of its data to a run. Every check of a config happens here.

Nothing is read and no device is used, so a run can be rebuilt for sampling from config.json and data.json alone. What
depends on the machine, the data files or the teacher is checked when training starts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
from flax import linen as nn
from ml_collections import ConfigDict

from jaxdiff import autoencoders, solvers
from jaxdiff.conditions import CONTROL, SEMANTIC, Conditions
from jaxdiff.conventions import Convention
from jaxdiff.data import Dataset, DataSpec, load
from jaxdiff.errors import choose, pick
from jaxdiff.methods import METHODS, Entry, Method, Parts, tracking
from jaxdiff.models import conditioning
from jaxdiff.training import components, padding, parameters, teachers
from jaxdiff.training.components import plain

IMAGELESS = ("blank", "prompts")  # data sources without images to compare samples with


@dataclasses.dataclass(frozen=True)
class Run:
    """A run without its parameters: everything that training and sampling need to know."""

    config: ConfigDict
    data: DataSpec
    model: nn.Module
    convention: Convention
    conditions: Conditions
    method: Method
    solver: solvers.Solver
    control: Mapping[str, np.ndarray]  # control metadata for samples, and for data that record none
    guided: bool  # whether the network has null conditioning
    decode: Callable[[np.ndarray], np.ndarray] | None = None  # latents to images, on the host
    widths: Mapping[float, str] = dataclasses.field(default_factory=dict)  # names of the averages that are stored

    @property
    def nfe(self) -> int:
        """Network evaluations per sample; guidance doubles them, control guidance triples them."""
        c = self.config.sample
        once = self.solver.nfe(c.timestamps, c.afs, c.final_denoise)
        if c.control_guidance != 1.0:
            return 3 * once
        if c.guidance != 1.0 and self.guided:
            return 2 * once
        return once

    @property
    def averaged(self) -> bool:
        """Whether samples use an average of the parameters."""
        options = self.config[self.config.method.name]
        return bool(options.get("average", True))

    def select(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The examples of a batch and what the network is conditioned on."""
        size = len(batch["image"])
        chosen = {"image": batch["image"]}
        for name in self.inputs:
            if name in batch:
                chosen[name] = batch[name]
            elif name in self.control:
                chosen[name] = np.tile(self.control[name], (size, 1))
        return chosen

    @property
    def inputs(self) -> tuple[str, ...]:
        """Entries of a batch that the network is conditioned on."""
        mask = ("text_mask",) if self.config.cond.padding else ()  # padding reads and removes it
        return (*self.conditions, *mask)

    def example(self, size: int) -> dict[str, np.ndarray]:
        """A batch of zeros with the shapes of the data."""
        batch = {"image": np.zeros((size, *self.data.shape), np.float32)}
        for name in self.inputs:
            if name in self.data.signals or name in self.control:
                signal = self.conditions.get(name) or self.data.signals[name]
                batch[name] = np.zeros(signal.batch_shape(size), signal.dtype)
        return batch


def build(config: ConfigDict, data: DataSpec) -> Run:
    """The run of a config on such data; every mistake in the config is an error here."""
    entry = pick(METHODS, config.method.name, "method")
    _check_sections(config, entry)
    options = components.options_of(entry.options, config[config.method.name], config.method.name)
    convention = components.convention_of(config)
    if config.train.init_from:
        parameters.check_public(config.train.init_kind, config.train.init_from, convention, rescaled=True)
    model = components.model_of(config, data, convention)
    conditions = Conditions.match(model, data.signals, data.name)
    control = conditioning.default_control(conditions, data.shape, **config.sample.control)
    pad = padding.of(config, conditions, data.name)
    if pad is not None:
        conditions = padding.without_mask(conditions, pad)
    control_dropout = getattr(options, "control_dropout", 0.0)
    _check_control_guidance(config, conditions, control_dropout)
    null = conditions.null(SEMANTIC)
    control_null = conditions.null(CONTROL) if control_dropout else None
    solver = solvers.make(config.sample.solver, **plain(config.sample.options))
    entry.check(options, config.sample)
    takes_teacher = entry.teacher(options)
    parts = Parts(
        model=model,
        optimizers=components.optimizers_of(config, model),
        convention=convention,
        conditions=conditions,
        sampling=components.sampling_of(config, convention, solver, None if config.sample.weak else null, control_null),
        shape=data.shape,
        sigmas=components.sigmas_of(config, convention),
        shift=config.noise.shift,
        average=components.average_of(config),
        couple=components.coupling_of(config, conditions),
        teacher=teachers.make(config, model, convention, conditions, data) if takes_teacher else None,
        total=config.train.steps,
        accum_steps=config.optim.accum_steps,
    )
    method = entry.build(options, parts)
    if pad is not None:
        method = padding.padded(method, pad)
    if config.teacher.offload and takes_teacher:
        method = teachers.offloaded(method)
    widths = _widths(config)
    if widths:
        method = tracking.tracked(method, widths)
    decode = autoencoders.decoder(config, data)
    guided = bool(null)
    return Run(config, data, model, convention, conditions, method, solver, control, guided, decode, widths)


def _widths(config: ConfigDict) -> dict[float, str]:
    """The names of the power-function averages that are stored, by width."""
    c = config.ema
    if bool(c.widths) != (c.snapshot_every > 0):
        raise ValueError(
            f"ema.widths={tuple(c.widths)} are stored every ema.snapshot_every={c.snapshot_every} steps; set both"
        )
    averaged = config[config.method.name].get("average", True)
    own = c.options.get("sigma_rel", 0.05) if c.kind == "power" and averaged else 0.0
    return tracking.names_of(c.widths, own)


def load_data(config: ConfigDict) -> Dataset:
    """The dataset of a config, which is also a DataSpec."""
    return load(config.data.source, seed=config.seed, **plain(config.data.options))


def reference_data(config: ConfigDict) -> Dataset:
    """The data as evaluation uses them: in stored order, not flipped or augmented."""
    options = {**plain(config.data.options), "shuffle": False, "flip": False, "augment": 0.0}
    return load(config.data.source, seed=config.seed, **options)


def _check_sections(config: ConfigDict, entry: Entry) -> None:
    choose(config.train.on_nonfinite, ("stop", "skip"), "train.on_nonfinite")
    choose(config.train.init_kind, ("run", *parameters.PUBLIC), "train.init_kind")
    if config.data.source in IMAGELESS and config.train.eval_every:
        raise ValueError(
            f"data.source={config.data.source!r} has no images to compare samples with; set train.eval_every=0"
        )
    if config.noise.assignment != "none" and not entry.data:
        paired = [name for name, other in METHODS.items() if other.data]
        raise ValueError(
            f"noise.assignment={config.noise.assignment!r} assigns noise to data, which method {config.method.name!r} "
            f"does not use; it applies to {', '.join(paired)}"
        )


def _check_control_guidance(config: ConfigDict, conditions: Conditions, control_dropout: float) -> None:
    scale = config.sample.control_guidance
    if scale != 1.0 and not (control_dropout and conditions.has(CONTROL)):
        raise ValueError(
            f"sample.control_guidance={scale} needs a network trained with diffusion.control_dropout above 0; got "
            f"method {config.method.name!r} and {control_dropout}"
        )


def check_sampling(config: ConfigDict, trained: ConfigDict) -> None:
    """A student must be sampled as it was trained; `trained` is the config of its run."""
    for name in METHODS[trained.method.name].fixed:
        if config.sample[name] != trained.sample[name]:
            raise ValueError(
                f"a student must be sampled as it was trained: leave sample.{name} at {trained.sample[name]}, "
                f"got {config.sample[name]}"
            )
