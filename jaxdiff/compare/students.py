"""Students of one teacher at equal cost: a config for each method, its learning rate, its training.

    evaluations of a step = FLOPs of the step / FLOPs of the network on one example

so a gradient counts as the forward evaluations it costs. Seconds leave out compilation; how many steps fit into them is
measured on the first steps. The search for the learning rate is part of the budget; sampling and measuring are not.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxdiff import flops, training
from jaxdiff.compare.measure import OTHER, Meter, with_samples
from jaxdiff.compare.settings import Record, Settings, rungs, stored, write
from jaxdiff.data import DataSpec
from jaxdiff.methods import METHODS, TrainState, exported
from jaxdiff.training import Run, components, inherit, state
from jaxdiff.training.build import IMAGELESS
from jaxdiff.training.sampling import mesh_of
from jaxdiff.trees import Params

PROBE = 8  # steps that are timed
Say = Callable[[str], None]


class Stopped(Exception):
    """A signal ended training; the run was saved."""


class Student(NamedTuple):
    """A method that takes part: the config of its students, and the numbers of evaluations they are sampled with."""

    name: str
    method: str
    config: ConfigDict
    nfe: tuple[int, ...]


def student(teacher: ConfigDict, text: str, settings: Settings, guidance: float, edit: Callable | None) -> Student:
    """The student of NAME:ARGUMENT; ValueError with the reason if the method does not apply."""
    method, _, argument = text.partition(":")
    base = with_samples(teacher, settings)
    base.sample.guidance = guidance
    config = inherit.student_config(base, method, argument, teacher.teacher.kind, teacher.teacher.path)
    if needs_data(config) and config.data.source in IMAGELESS:
        raise ValueError(f"{method} needs data, and the teacher comes without (data.source={config.data.source!r})")
    with config.unlocked():
        config.train.log_every = config.train.save_every = 10**9
        config.train.sample_every = config.train.eval_every = config.sample.count = 0
        config.checkpoint.keep = 1
    if edit is not None:
        edit(config)
    data = training.load_data(config)
    run = training.build(config, data)
    state.declare(run, mesh_of(config))  # reads the teacher's shapes, and refuses one that does not serve
    counts = tuple(n for n in settings.nfe if _sampled(config, n, data) is not None) or (run.nfe,)
    name = text if guidance == 1.0 else f"{text}, guidance {guidance:g}"
    return Student(name, method, config, counts)


def needs_data(config: ConfigDict) -> bool:
    """Whether the method of a config trains on examples of the data."""
    name = config.method.name
    entry = METHODS[name]
    return entry.data or entry.real(components.options_of(entry.options, config[name], name))


def _sampled(config: ConfigDict, nfe: int, data: DataSpec) -> Run | None:
    """The run that samples with `nfe` evaluations; None if this student cannot."""
    try:
        run = training.build(components.with_nfe(config, nfe), data)
    except ValueError:
        return None
    return run if run.nfe == nfe else None


def evaluations_per_step(run: Run, mesh: Mesh) -> float:
    """What a training step costs, in evaluations of the network on one example."""
    declared = state.declare(run, mesh)
    batch = jax.eval_shape(lambda: run.example(run.config.data.batch_size))
    step = flops.total(jax.make_jaxpr(run.method.step)(declared, batch, jax.random.key(0)).jaxpr)
    x = jax.ShapeDtypeStruct((1, *run.data.shape), np.float32)
    cond = jax.eval_shape(lambda: run.conditions.example(1))

    def once(params: Params, x: jax.Array, cond: dict[str, jax.Array] | None) -> jax.Array:
        return run.method.denoiser(params)(x, 1.0, cond)

    one = flops.total(jax.make_jaxpr(once)(declared.params["student"], x, cond).jaxpr)
    if not one:
        raise ValueError("the network has no matrix products to count evaluations by; give the budget in seconds: 300s")
    return step / one


class Trainer:
    """Trains students of one method within the budget; runs lie in `folder`."""

    def __init__(self, made: Student, settings: Settings, meter: Meter, folder: Path, say: Say) -> None:
        self.made, self.settings, self.meter, self.folder, self.say = made, settings, meter, folder, say
        self.mesh = mesh_of(made.config)
        self.run = training.build(made.config, training.load_data(made.config))
        self.cost = evaluations_per_step(self.run, self.mesh) if settings.budget.unit == "evaluations" else 0.0

    def changed(self, rate: float, steps: int, seed: int, *, constant: bool) -> ConfigDict:
        """The config with this learning rate, for that many steps; the search keeps the rate constant."""
        config = ConfigDict(self.made.config.to_dict())
        config.optim.learning_rate, config.train.steps = rate, steps
        config.optim.decay_images = config.data.batch_size * steps
        if constant:
            config.optim.decay, config.optim.decay_images = "constant", 0
        config.seed = config.seed + seed
        return config

    def steps(self, share: float) -> int:
        """The steps that a share of the budget pays for."""
        budget = self.settings.budget
        price = self.cost if budget.unit == "evaluations" else self.seconds_per_step
        return max(1, math.floor(share * budget.amount / price))

    @cached_property
    def seconds_per_step(self) -> float:
        """Measured on a few steps of a run of its own."""
        folder = self.folder / "probe"
        config = self.changed(self.made.config.optim.learning_rate, PROBE, 0, constant=True)
        shutil.rmtree(folder, ignore_errors=True)
        seconds = self.train(config, folder)[1] / PROBE
        shutil.rmtree(folder)
        return seconds

    def train(self, config: ConfigDict, folder: Path) -> tuple[TrainState, float]:
        """The last state of a run, and the seconds of its steps, those before an interruption included."""
        spent = folder / "seconds.json"
        before = stored(spent, lambda: {"seconds": 0.0})["seconds"]
        result = training.train(config, folder, quiet=True)
        write(spent, {"seconds": before + result.seconds})
        if result.stopped:
            raise Stopped(f"stopped in {folder}; rerun the command to resume")
        return result.state, before + result.seconds

    def search(self) -> Record:
        """Successive halving over the learning rate, on a seed that is not reported."""
        rate = float(self.made.config.optim.learning_rate)
        rates = [rate * factor for factor in self.settings.rates]
        tried: list[Record] = []
        total = 0
        for count, share in rungs(self.settings):
            total += self.steps(share)
            scores = {}
            for value in rates[:count]:
                scores[value], used = self.score(value, total)
                tried.append({"rate": value, "steps": total, "score": _finite(scores[value]), "seconds": used})
                self.say(f"  {self.made.name}: rate {value:.2g}, {total} steps: {scores[value]:.4g}")
            rates = sorted(scores, key=lambda value: scores[value])
        if tried and not any(record["score"] is not None for record in tried):
            raise ValueError(f"{self.made.name} diverged at every learning rate tried: {', '.join(map(str, rates))}")
        if tried and rates[0] in (min(self.settings.rates) * rate, max(self.settings.rates) * rate):
            self.say(f"  {self.made.name}: the best rate, {rates[0]:.2g}, is at the end of --rates: widen them")
        shutil.rmtree(self.folder / "search", ignore_errors=True)
        return {"rate": rates[0] if tried else rate, "recipe_rate": rate, "tried": tried}

    def score(self, rate: float, steps: int) -> tuple[float, float]:
        """The geometric mean of the distance over the evaluation counts, and the seconds spent on training."""
        try:
            config = self.changed(rate, steps, 0, constant=True)
            last, seconds = self.train(config, self.folder / "search" / f"{rate:.3g}")
            seed = self.meter.seed + OTHER
            values = [self.meter(sampler, exported(last), seed=seed)[0]["quality"] for sampler in self.samplers]
        except (training.NonFinite, FloatingPointError):
            return math.inf, 0.0
        return float(np.exp(np.mean(np.log(np.maximum(values, 1e-12))))), seconds

    @cached_property
    def samplers(self) -> list[training.Sampler]:
        """One per number of evaluations; each is compiled once for all students of the method."""
        found = [_sampled(self.made.config, nfe, self.run.data) for nfe in self.made.nfe]
        return [training.Sampler(run or self.run, self.mesh) for run in found]

    def final(self, rate: float, seed: int) -> Record:
        """A student at this rate with the rest of the budget: its rows, and what it cost."""
        steps = self.steps(1 - self.settings.search if rungs(self.settings) else 1.0)
        folder = self.folder / f"seed{seed}"
        last, seconds = self.train(self.changed(rate, steps, seed, constant=False), folder)
        rows = []
        for sampler in self.samplers:
            row, images = self.meter(sampler, exported(last))
            np.savez(folder / f"shown_{row['nfe']}.npz", images=images)
            rows.append(row)
        shutil.rmtree(folder / "checkpoints")
        trained = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(last.params))
        cost = self.cost or evaluations_per_step(self.run, self.mesh)
        return {
            "steps": steps,
            "seconds": seconds,
            "evaluations": steps * cost,
            "parameters": trained,
            "rows": rows,
        }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
