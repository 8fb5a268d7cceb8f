"""From a config and a description of its data to a run. Every check of a config happens here.

Nothing is read and no device is used, so a run can be rebuilt for sampling from config.json and data.json alone. What
depends on the machine, the data files or the teacher is checked when training starts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from flax import linen as nn
from ml_collections import ConfigDict

import jaxdiff.configs.default as default
from jaxdiff import autoencoders, ranges, solvers
from jaxdiff.conditions import CONTROL, SEMANTIC, Conditions
from jaxdiff.conventions import Convention
from jaxdiff.data import Dataset, DataSpec, load
from jaxdiff.errors import choose, pick
from jaxdiff.methods import METHODS, Entry, Method, Parts, lora, tracking
from jaxdiff.models import conditioning
from jaxdiff.training import alignment, components, padding, parameters, teachers
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
    check_values(config)
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
    _check_counts(getattr(options, "nfe", ()), conditions)
    control_dropout = getattr(options, "control_dropout", 0.0)
    _check_control_guidance(config, conditions, control_dropout)
    null = conditions.null(SEMANTIC)
    control_null = conditions.null(CONTROL) if control_dropout else None
    solver = solvers.make(config.sample.solver, **plain(config.sample.options))
    entry.check(options, config.sample)
    if entry.real(options) and config.data.source in IMAGELESS:
        raise ValueError(
            f"method {config.method.name!r} trains on real images, which data.source={config.data.source!r} has not; "
            "give it data, or use a method without them: emd, diff_instruct, sid, dmd2 with dmd2.gan=0"
        )
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
        features=alignment.features_of(config, data) if config.method.name == "diffusion" else None,
    )
    method = _method(partial(entry.build, options), parts, config, convention)
    if pad is not None:
        method = padding.padded(method, pad)
    if config.teacher.offload and method.frozen:
        method = teachers.offloaded(method)
    widths = _widths(config)
    if widths:
        method = tracking.tracked(method, widths)
    decode = autoencoders.decoder(config, data)
    guided = bool(null)
    return Run(config, data, model, convention, conditions, method, solver, control, guided, decode, widths)


def _method(make: Callable[[Parts], Method], parts: Parts, config: ConfigDict, convention: Convention) -> Method:
    """The method on all parameters or, with lora.rank, on low-rank updates of the teacher or of train.init_from."""
    options = components.options_of(lora.Options, config.lora, "lora")
    if not options.rank:
        return make(parts)
    if config.ema.widths:
        raise ValueError(
            f"ema.widths={tuple(config.ema.widths)} are averages of all parameters, and with lora.rank={options.rank} "
            "only adapters are averaged; unset one of them"
        )
    base = None
    if config.train.init_from:
        base = parameters.frozen_base(config, parts.model, convention, parts.cond, parts.shape)
    return lora.adapted(make, parts, options, base)


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


def check_values(config: ConfigDict) -> None:
    """Every value is of its kind and in its range, as configs/default.py and the options of methods declare them."""
    values, noted = flat(config), comments()
    defaults = {name: value for name, value in flat(default.get_config()).items() if name in values}
    ranges.check_kinds(values, defaults)
    ranges.check(values, noted)


def comments() -> dict[str, str]:
    """The comment of every key: of the default config, of the options of methods and of low-rank updates."""
    found = dict(ranges.of_file(Path(default.__file__)))
    for section, options in {**{name: entry.options for name, entry in METHODS.items()}, "lora": lora.Options}.items():
        found |= {f"{section}.{name}": comment for name, comment in ranges.of_class(options).items()}
    return found


def flat(config: ConfigDict, prefix: str = "") -> dict[str, Any]:
    """The values of a config by section.key."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, ConfigDict) else {prefix + name: value}
    return found


def load_data(config: ConfigDict) -> Dataset:
    """The dataset of a config, which is also a DataSpec."""
    check_values(config)
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


def _check_counts(counts: Sequence[int], conditions: Conditions) -> None:
    """A student that takes several numbers of evaluations is conditioned on the number."""
    if len(set(counts)) > 1 and "step" not in conditions:
        raise ValueError(
            f"one student for {', '.join(map(str, counts))} evaluations must know which of them is running: set "
            "model.fields.step_embed='zero', or train one student per number if the network has no such field"
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
