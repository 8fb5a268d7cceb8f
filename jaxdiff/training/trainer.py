"""The one training loop, read top to bottom: build, restore or start, step, log, sample, evaluate, save.

It can be killed at any time and resumed by rerunning the command, with bit-identical results: the batch and the key of
a step are functions of (seed, step), and the state holds the rest.
"""

from __future__ import annotations

import os
import time
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxdiff import autoencoders, evaluation, noise
from jaxdiff.data import Dataset, prefetch, spec
from jaxdiff.methods import TrainState, exported
from jaxdiff.methods.tracking import averages_of
from jaxdiff.placement import ways
from jaxdiff.training import distributed, export, snapshots, state
from jaxdiff.training.build import Run, build, load_data
from jaxdiff.training.checkpoint import Checkpoints
from jaxdiff.training.components import plain
from jaxdiff.training.curriculum import stages
from jaxdiff.training.evaluate import eval_sampler, evaluate, main_metric
from jaxdiff.training.logs import Logger
from jaxdiff.training.sampling import Sampler, captions_of
from jaxdiff.training.sharding import Devices, check_batch, check_host_memory, config_mesh, fetch, global_batch
from jaxdiff.training.state import Guard, check_finite, compile_step, declare, guarded_step, save
from jaxdiff.training.stop import Stop


class Result(NamedTuple):
    """How a run ended: its last state, whether it was stopped early, and its last evaluation."""

    state: TrainState
    step: int
    stopped: bool
    metrics: dict[str, Any]


def train(config: ConfigDict, workdir: str | os.PathLike, *, quiet: bool = False, devices: Devices = None) -> Result:
    """Train a config in `workdir`, resuming from its newest checkpoint if there is one."""
    if config.curriculum:
        return train_stages(config, Path(workdir), quiet=quiet, devices=devices)
    run, mesh = prepare(config, devices)
    distributed.agree(config.to_dict())
    declared = declare(run, mesh)
    resumes = state.has_checkpoint(Path(workdir) / "checkpoints")
    frozen = {} if resumes else state.read_frozen(run)
    root = make_folder(workdir)
    metric = ""
    if config.train.eval_every:
        metric = config.checkpoint.metric or main_metric(config)
    checkpoints = Checkpoints(root / "checkpoints", config.checkpoint.keep, metric)
    first = checkpoints.latest() or 0
    if first:
        checkpoints.check(first, declared)  # before any file of the run is overwritten
    write_records(root, run)
    if jax.process_index() == 0:
        snapshots.discard_after(root, first)
    log = Logger(root, config.train.steps, first, quiet)
    with Stop() as stop:
        try:
            begin = state.start(run, mesh, checkpoints, declared, log, frozen)
            del frozen  # now part of the state, on the devices
            state.report(run, mesh, declared, log)
            return Loop(run, mesh, checkpoints, log, stop, root, metric).run_from(begin, first, declared)
        finally:
            checkpoints.close()
            log.close()


def prepare(config: ConfigDict, devices: Devices = None) -> tuple[Run, Mesh]:
    """The run with its data, and its mesh; rejects what this machine cannot do."""
    run = build(config, load_data(config))
    mesh = config_mesh(config, devices)
    check_batch(config.data.batch_size, mesh, config.optim.accum_steps)
    c = config.noise
    if c.assignment != "none":
        noise.check_coupling(c.assignment, config.data.batch_size, ways(mesh), **plain(c.assignment_options))
    if config.teacher.offload and run.method.frozen:
        check_host_memory(mesh.devices.flat[0])
    autoencoders.check_files(config)
    return run, mesh


def train_stages(config: ConfigDict, root: Path, **how: Any) -> Result:
    """Train the stages of a curriculum in their folders, each from the previous parameters; skip finished stages."""
    staged = stages(config)
    for _, stage in staged:
        prepare(stage, how["devices"])  # report errors of the last stage before training the first
    make_folder(root)
    if jax.process_index() == 0:
        export.write_config(root, config)  # so that `jaxdiff train --workdir` alone resumes the curriculum
    for i, (name, stage) in enumerate(staged):
        folder = root / name
        with stage.unlocked():
            if i:
                stage.train.init_from, stage.train.init_kind = str(root / staged[i - 1][0]), "run"
        if i < len(staged) - 1 and finished(folder, stage.train.steps):
            continue
        result = train(stage, folder, **how)
        if result.stopped:
            break
    return result


def finished(root: Path, steps: int) -> bool:
    """Whether a run reached its last step and was exported."""
    return (root / export.FILE).is_file() and (root / "checkpoints" / str(steps)).is_dir()


def make_folder(workdir: str | os.PathLike) -> Path:
    """Create the run's folder and check that it is writable."""
    root = Path(workdir).absolute()
    try:
        root.mkdir(parents=True, exist_ok=True)
        if jax.process_index() == 0:
            (root / ".writable").touch()
            (root / ".writable").unlink()
    except OSError as error:
        raise OSError(
            f"cannot write to workdir {root}: {error}. Choose another --workdir or make it writable"
        ) from error
    return root


def write_records(root: Path, run: Run) -> None:
    """Write config.json and data.json, and enable the compilation cache."""
    if jax.process_index() == 0:
        try:
            export.write_config(root, run.config)
            spec.write(root, run.data)
        except OSError as error:
            raise OSError(
                f"cannot write to workdir {root}: {error}. Choose another --workdir or make it writable"
            ) from error
    if run.config.compile_cache:
        jax.config.update("jax_compilation_cache_dir", str(Path(run.config.compile_cache).expanduser()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


class Loop:
    """Runs steps to the end or to a stop, and saves the final state."""

    def __init__(
        self, run: Run, mesh: Mesh, checkpoints: Checkpoints, log: Logger, stop: Stop, root: Path, metric: str
    ) -> None:
        self.run, self.mesh, self.checkpoints, self.log, self.stop = run, mesh, checkpoints, log, stop
        self.root, self.metric = root, metric
        assert isinstance(run.data, Dataset)
        self.dataset = run.data
        self.base = jax.random.fold_in(jax.random.key(run.config.seed), 1)
        self.metrics: dict[str, Any] = {}

    def run_from(self, begin: TrainState, first: int, declared: TrainState) -> Result:
        """Run steps from `first` to the last."""
        c, size = self.run.config.train, self.run.config.data.batch_size
        guard = Guard(jnp.int32(0), jnp.int32(-1))
        step_once = guarded_step(self.run, self.mesh, state.shardings_of(declared))
        current, step, saved, stopped = begin, first, first, False
        pace = Pace(first, c.steps)
        here = (jax.process_index(), jax.process_count())
        workers = self.run.config.data.workers or None
        best: dict[str, float] | None = None
        with prefetch(self.dataset, first, size, *here, stop_step=c.steps, workers=workers) as batches:
            for local in batches:
                batch = global_batch(self.run.select(local), self.mesh)
                if step == first:
                    arguments = (current, guard, batch, self.base, jnp.int32(0))
                    step_once = compile_step(step_once, arguments, self.stop, self.log)
                    pace.restart(step)
                current, guard, values = step_once(current, guard, batch, self.base, jnp.int32(step))
                step += 1
                pace.add(values)
                self.log.progress(step)
                if step % c.log_every == 0 or step == c.steps:
                    self._check(current, guard)
                    self.log.scalars(step, pace.line(step))
                self._store_averages(current, step)
                stopped, best = self._side_work(current, step)
                if stopped or step == c.steps:
                    break
                if step % c.save_every == 0:
                    self._check(current, guard)
                    save(self.checkpoints, step, current, best)
                    saved = step
        self._check(current, guard)
        if step > saved:
            save(self.checkpoints, step, current, best)
        return self._end(current, step, stopped)

    def _check(self, current: TrainState, guard: Guard) -> None:
        check_finite(self.run, self.mesh, self.dataset, current, guard, self.base, self.log)

    def _store_averages(self, current: TrainState, step: int) -> None:
        """Store the averages of all widths when due."""
        every = self.run.config.ema.snapshot_every
        if not self.run.widths or (step % every and step != self.run.config.train.steps):
            return
        averages = fetch(averages_of(current, self.run.widths))
        if jax.process_index() == 0:
            snapshots.write(self.root, step, averages)

    def _side_work(self, current: TrainState, step: int) -> tuple[bool, dict[str, float] | None]:
        """Evaluate and sample when due: whether to stop here, and the metric that ranks this step."""
        c = self.run.config.train
        if self.stop.requested(step):
            return True, None
        best: dict[str, float] | None = None
        if c.eval_every and step % c.eval_every == 0:
            record = evaluate(
                self.run,
                exported(current),
                self.mesh,
                stop=partial(self.stop.requested, step),
                sampler=self._eval_sampler,
            )
            if record is None:
                return True, None
            self.metrics, best = record, self._note(step, record)
        if c.sample_every and step % c.sample_every == 0:
            self._draw(current, step)
        return False, best

    @cached_property
    def _eval_sampler(self) -> Sampler:
        return eval_sampler(self.run, self.mesh)

    @cached_property
    def _grid_sampler(self) -> Sampler:
        return Sampler(self.run, self.mesh, "cycle")

    def _note(self, step: int, record: dict[str, Any]) -> dict[str, float]:
        """Log an evaluation, append it to evaluations.jsonl, and return the metric that ranks it."""
        values = {name: value for name, value in record.items() if isinstance(value, float)}
        self.log.scalars(step, {f"eval/{name}": value for name, value in values.items()})
        if jax.process_index() == 0:
            evaluation.write(self.root / "evaluations.jsonl", {"step": step, **record})
        if self.metric not in values:
            raise ValueError(
                f"checkpoint.metric={self.metric!r} is not a metric of this run; choose one of {', '.join(values)}"
            )
        return {self.metric: values[self.metric]}

    def _draw(self, current: TrainState, step: int) -> None:
        """Log a grid of samples, all classes in turn, or with captions."""
        count = self.run.config.sample.count
        if len(self.run.data.shape) != 3 or not count:
            return
        images, _ = self._grid_sampler.sample(exported(current), count, self.run.config.seed)
        captions = captions_of(self.run.data, count) if "text" in self.run.conditions else []
        self.log.images(step, images, captions=captions)

    def _end(self, current: TrainState, step: int, stopped: bool) -> Result:
        self.checkpoints.wait()
        params = fetch(exported(current))
        if jax.process_index() == 0:
            export.write(self.root, params, step)
        if stopped:
            name = self.stop.signal or "stop"
            self.log.say(f"{name} received: saved step {step} to {self.root}; rerun the command to resume")
        else:
            self._draw(current, step)
            self.log.say(f"done: {step} steps, exported to {self.root / export.FILE}")
        return Result(current, step, stopped, self.metrics)


class Pace:
    """Metrics and speed since the last log line."""

    def __init__(self, first: int, steps: int) -> None:
        self.steps = steps
        self.restart(first)

    def restart(self, step: int) -> None:
        self.pending: list[dict[str, Array]] = []
        self.mark, self.clock = step, time.monotonic()

    def add(self, values: dict[str, Array]) -> None:
        self.pending.append(values)

    def line(self, step: int) -> dict[str, float]:
        """Mean metrics, steps per second and minutes left; resets the count."""
        rate = (step - self.mark) / max(time.monotonic() - self.clock, 1e-9)
        values = mean(self.pending)
        self.restart(step)
        return {**values, "steps_per_second": rate, "minutes_left": (self.steps - step) / rate / 60}


def mean(pending: list[dict[str, Array]]) -> dict[str, float]:
    """Means of the finite values since the last log line."""
    fetched = jax.device_get(pending)
    columns = {name: np.array([float(values[name]) for values in fetched]) for name in fetched[0]}
    finite = {name: column[np.isfinite(column)] for name, column in columns.items()}
    return {name: float(column.mean()) for name, column in finite.items() if len(column)}
