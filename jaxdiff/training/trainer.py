"""The one training loop, read top to bottom: build, restore or start, step, log, sample, evaluate, save.

It can be killed at any time and resumed by rerunning the command, with bit-identical results: the batch and the key of
a step are functions of (seed, step), and the state holds the rest.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxdiff import autoencoders, evaluation, noise
from jaxdiff.data import Dataset, prefetch
from jaxdiff.methods import TrainState, exported
from jaxdiff.methods.method import averaged
from jaxdiff.methods.tracking import averages_of
from jaxdiff.models.low_rank import Adapters
from jaxdiff.placement import ways
from jaxdiff.training import continuity, distributed, export, logs, snapshots, state
from jaxdiff.training.build import Run, build, load_data
from jaxdiff.training.checkpoint import Checkpoints
from jaxdiff.training.components import plain
from jaxdiff.training.curriculum import stages
from jaxdiff.training.evaluate import eval_sampler, evaluate, main_metric
from jaxdiff.training.logs import Logger, OnMetrics
from jaxdiff.training.pace import Pace
from jaxdiff.training.sampling import Sampler, captions_of
from jaxdiff.training.sharding import Devices, check_batch, check_host_memory, config_mesh, fetch, global_batch
from jaxdiff.training.state import Guard, check_finite, compile_step, declare, guarded_step, model_flops, save
from jaxdiff.training.stop import Stop
from jaxdiff.training.watchdog import Watchdog
from jaxdiff.training.workdir import begun, finished, locked, note_changes, write_records


class Result(NamedTuple):
    """How a run ended: its last state, whether it was stopped early, its last evaluation, and the seconds its steps
    took, without compilation."""

    state: TrainState
    step: int
    stopped: bool
    metrics: dict[str, Any]
    seconds: float = 0.0


def train(
    config: ConfigDict,
    workdir: str | os.PathLike,
    *,
    quiet: bool = False,
    devices: Devices = None,
    allow_config_change: bool = False,
    stall_timeout: float = 0.0,
    on_metrics: OnMetrics | None = None,
) -> Result:
    """Train a config in `workdir`, resuming from its newest checkpoint if there is one.

    Args:
        config: what `get_config` of a config file returns.
        workdir: folder for checkpoints, logs, samples and the exported parameters; also a URL, such as gs://bucket/run.
        quiet: print nothing.
        devices: those to use; by default all.
        allow_config_change: resume although the config or the data differ from those the run began with in what alters
            its result.
        stall_timeout: seconds without progress after which several processes end; one warns. 0: never.
        on_metrics: called by the main process as `on_metrics(step, values)` whenever metrics are logged, those of
            evaluations under names that begin with `eval/`. An exception that it raises ends the run.

    Returns:
        The last state, its step, whether the run was stopped by a signal, and its last evaluation.

    Raises:
        NonFinite: a value became NaN or infinite and `train.on_nonfinite` is "stop".
    """
    how: dict[str, Any] = {
        "quiet": quiet,
        "allow_config_change": allow_config_change,
        "stall_timeout": stall_timeout,
        "on_metrics": on_metrics,
    }
    if config.curriculum:
        return train_stages(config, workdir, devices, how)
    run, mesh = prepare(config, devices)
    distributed.agree(config.to_dict(), run.data.fingerprint)
    declared = declare(run, mesh)
    frozen = {} if begun(workdir) else state.read_frozen(run)
    with locked(workdir, quiet) as root:
        return train_in(root, run, mesh, declared, frozen, **how)


def train_in(
    root: Path,
    run: Run,
    mesh: Mesh,
    declared: TrainState,
    frozen: dict[str, Any],
    quiet: bool,
    allow_config_change: bool,
    stall_timeout: float,
    on_metrics: OnMetrics | None,
) -> Result:
    """Train in a folder that is locked; `frozen` are arrays from outside, for a fresh start."""
    config = run.config
    metric = (config.checkpoint.metric or main_metric(config)) if config.train.eval_every else ""
    opened = Checkpoints(root / "checkpoints", config.checkpoint.keep, metric)
    if jax.process_count() > 1:
        opened.tell_failures(partial(distributed.fail, distributed.REFUSED))
    with Stop() as stop, closed_in_the_end(opened) as checkpoints:
        first = distributed.same_step(checkpoints.latest() or 0, root)
        changes: list[continuity.Change] = []
        if first:  # before any file of the run is overwritten
            checkpoints.check(first, declared)
            changes = distributed.in_step(lambda: continuity.check(root, run, mesh, first, allow_config_change))
        distributed.in_step(lambda: write_records(root, run, first))
        log = Logger(root, config.train.steps, first, quiet, config, on_metrics)
        with closing(log), Watchdog(stall_timeout, distributed.stalled) as watchdog:
            begin = state.start(run, mesh, checkpoints, declared, log, frozen)
            frozen.clear()  # now part of the state, on the devices
            note_changes(root, run, mesh, first, changes, log)
            state.report(run, mesh, declared, log)
            return Loop(run, mesh, checkpoints, log, stop, watchdog, root, metric).run_from(begin, first, declared)


@contextmanager
def closed_in_the_end(checkpoints: Checkpoints) -> Iterator[Checkpoints]:
    """Closes checkpoints. After an error, what closing finds is not raised in its place; and with several processes
    nothing is closed, since that would wait for the others."""
    try:
        yield checkpoints
    except BaseException:
        if jax.process_count() == 1:
            with suppress(Exception):
                checkpoints.close()
        raise
    checkpoints.close()


def prepare(config: ConfigDict, devices: Devices = None) -> tuple[Run, Mesh]:
    """The run with its data, and its mesh; rejects what this machine cannot do."""
    run = build(config, load_data(config))
    logs.check(config)
    mesh = config_mesh(config, devices)
    check_batch(config.data.batch_size, mesh, config.optim.accum_steps)
    c = config.noise
    if c.assignment != "none":
        noise.check_coupling(c.assignment, config.data.batch_size, ways(mesh), **plain(c.assignment_options))
    if config.teacher.offload and run.method.frozen:
        check_host_memory(mesh.devices.flat[0])
    autoencoders.check_files(config)
    return run, mesh


def train_stages(config: ConfigDict, workdir: str | os.PathLike, devices: Devices, how: dict[str, Any]) -> Result:
    """Train the stages of a curriculum in their folders, each from the previous parameters; skip finished stages."""
    staged = stages(config)
    ready = [prepare(stage, devices) for _, stage in staged]  # errors of the last stage before training the first
    with locked(workdir, how["quiet"]) as root:
        for (name, stage), (run, mesh) in zip(staged[:-1], ready, strict=False):
            if finished(root / name, stage.train.steps):
                continuity.check(root / name, run, mesh, stage.train.steps, how["allow_config_change"])
        if jax.process_index() == 0:
            export.write_config(root, config)  # so that `jaxdiff train --workdir` alone resumes the curriculum
        del ready
        for i, (name, stage) in enumerate(staged):
            folder = root / name
            with stage.unlocked():
                if i:
                    stage.train.init_from, stage.train.init_kind = str(root / staged[i - 1][0]), "run"
            if i < len(staged) - 1 and finished(folder, stage.train.steps):
                continue
            result = train(stage, folder, devices=devices, **how)
            if result.stopped:
                break
    return result


class Loop:
    """Runs steps to the end or to a stop, and saves the final state."""

    def __init__(
        self,
        run: Run,
        mesh: Mesh,
        checkpoints: Checkpoints,
        log: Logger,
        stop: Stop,
        watchdog: Watchdog,
        root: Path,
        metric: str,
    ) -> None:
        self.run, self.mesh, self.checkpoints, self.log, self.stop = run, mesh, checkpoints, log, stop
        self.watchdog, self.root, self.metric = watchdog, root, metric
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
        pace = Pace(first, c.steps, self.log, self.mesh.size)
        here = (jax.process_index(), jax.process_count())
        workers = self.run.config.data.workers or None
        best: dict[str, float] | None = None
        begun = time.monotonic()
        with prefetch(self.dataset, first, size, *here, stop_step=c.steps, workers=workers) as batches:
            for local in pace.waiting(batches):
                batch = global_batch(self.run.select(local), self.mesh)
                if step == first:
                    arguments = (current, guard, batch, self.base, jnp.int32(0))
                    self.log.flops = model_flops(self.run, self.mesh, step_once, arguments)
                    with self.watchdog.during("compiling", limited=False):
                        step_once = compile_step(step_once, arguments, self.stop, self.log)
                    pace.restart(step)
                    begun = time.monotonic()
                self.log.profile(step, current)
                current, guard, values = step_once(current, guard, batch, self.base, jnp.int32(step))
                step += 1
                self.watchdog.step(next(iter(values.values())))
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
                    self._save(current, step, best)
                    saved = step
        self._check(current, guard)  # waits for the last step
        seconds = time.monotonic() - begun if step > first else 0.0
        if step > saved:
            self._save(current, step, best)
        with self.watchdog.during("exporting"):
            return self._end(current, step, stopped)._replace(seconds=seconds)

    def _save(self, current: TrainState, step: int, best: dict[str, float] | None) -> None:
        with self.watchdog.during("saving"):
            save(self.checkpoints, step, current, best)

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
            with self.watchdog.during("evaluating"):
                stop = partial(self._stop_evaluating, step)
                record = evaluate(self.run, exported(current), self.mesh, stop=stop, sampler=self._eval_sampler)
            if record is None:
                return True, None
            self.metrics, best = record, self._note(step, record)
        if c.sample_every and step % c.sample_every == 0:
            with self.watchdog.during("sampling"):
                self._draw(current, step)
        return False, best

    def _stop_evaluating(self, step: int) -> bool:
        """Whether to stop, asked after every batch of samples."""
        self.watchdog.alive()
        return self.stop.requested(step)

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
        self._write_lora(current)
        if stopped:
            name = self.stop.signal or "stop"
            self.log.say(f"{name} received: saved step {step} to {self.root}; rerun the command to resume")
        else:
            self._draw(current, step)
            self.log.say(f"done: {step} steps, exported to {self.root / export.FILE}")
        return Result(current, step, stopped, self.metrics)

    def _write_lora(self, current: TrainState) -> None:
        adapters, c = averaged(current), self.run.config
        if not isinstance(adapters, Adapters):
            return
        adapters = fetch(adapters)
        if jax.process_index() == 0:
            kind = c.train.init_kind if c.train.init_from else c.teacher.kind
            self.log.say(export.write_lora(self.root, self.run.model, adapters, kind))
