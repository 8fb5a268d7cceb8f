"""The one training loop, read top to bottom: build, restore or start, step, log, sample, evaluate, save.

It can be killed at any moment and run again with the same command: the batch and the key of a step are functions of
(seed, step), the state carries the rest, so the result is the same to the bit.
"""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from jaxdiff import evaluation
from jaxdiff.data import prefetch
from jaxdiff.training import distributed, export, teachers, transfer
from jaxdiff.training.build import Job, build
from jaxdiff.training.checkpoint import Checkpoints
from jaxdiff.training.curriculum import stages
from jaxdiff.training.evaluate import captions, evaluate, sample, sampler
from jaxdiff.training.logs import Logger
from jaxdiff.training.sharding import bytes_per_device, fetch, global_batch, on_device, state_shardings, with_shardings
from jaxdiff.training.stop import Stop
from jaxdiff.trees import by_name, path_name


class NonFinite(RuntimeError):
    """Training met a NaN or an infinity."""


class Result(NamedTuple):
    """How a run ended: its last state, whether it was stopped early, and its last evaluation."""

    state: Any
    step: int
    stopped: bool
    metrics: dict[str, Any]


@struct.dataclass
class Guard:
    """Non-finite steps: how many, and the first one."""

    count: Any
    first: Any


def train(config: ConfigDict, workdir: str | os.PathLike, *, quiet: bool = False, devices: Any = None) -> Result:
    """Train as the config says, in `workdir`; going on from its newest checkpoint if there is one."""
    if config.curriculum:
        return train_stages(config, Path(workdir), quiet=quiet, devices=devices)
    job = build(config, devices)
    distributed.agree(config.to_dict())
    declared, shardings = declare(job)
    frozen = read_frozen(job, Path(workdir) / "checkpoints")
    root = prepare(workdir, config)
    metric = "distance" if config.train.eval_every else ""
    checkpoints = Checkpoints(root / "checkpoints", config.checkpoint.keep, metric)
    first = checkpoints.latest() or 0
    log = Logger(root, config.train.steps, first, quiet)
    with Stop() as stop:
        try:
            state = start(job, checkpoints, declared, shardings, log, frozen)
            del frozen  # the state holds it now, on the devices
            report(job, declared, log)
            return loop(job, state, first, shardings, checkpoints, log, stop, root)
        finally:
            checkpoints.close()
            log.close()


def train_stages(config: ConfigDict, root: Path, **how: Any) -> Result:
    """The stages of a curriculum, each in its folder and from the parameters of the last; done ones are passed over."""
    staged = stages(config)
    for _, stage in staged:
        build(stage, how["devices"])  # what is wrong with the last stage is told before the first
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
    """Whether a run has come to its last step and was exported."""
    return (root / "export.safetensors").is_file() and (root / "checkpoints" / str(steps)).is_dir()


def prepare(workdir: str | os.PathLike, config: ConfigDict) -> Path:
    """The folder of the run, writable, with its config."""
    root = Path(workdir).absolute()
    try:
        root.mkdir(parents=True, exist_ok=True)
        if jax.process_index() == 0:
            export.write_config(root, config)
    except OSError as error:
        raise OSError(f"cannot write to workdir {root}: {error}. Choose another --workdir or free it") from error
    if config.compile_cache:
        jax.config.update("jax_compilation_cache_dir", str(Path(config.compile_cache).expanduser()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    return root


# ------------------------------------------------------------------------------------------ start


def declare(job: Job) -> tuple[Any, Any]:
    """The state's shapes with shardings, and the shardings alone; nothing is computed."""
    outside = () if job.frozen is None else (job.frozen.shapes,)
    abstract = jax.eval_shape(job.method.init, jax.random.key(0), example_batch(job), *outside)
    shardings = state_shardings(abstract, job.mesh, job.config.mesh.min_size, job.config.teacher.offload)
    return with_shardings(abstract, shardings), shardings


def read_frozen(job: Job, checkpoints: Path) -> Any:
    """What the method's init takes from outside, such as a teacher; a run that goes on has it in its checkpoint."""
    return None if job.frozen is None or begun(checkpoints) else job.frozen.load()


def begun(checkpoints: Path) -> bool:
    """Whether a run has saved anything there."""
    return checkpoints.is_dir() and any(path.name.isdigit() for path in checkpoints.iterdir())


def example_batch(job: Job) -> Any:
    """A batch of zeros shaped like those of the data, one example per device."""
    ways = job.mesh.shape["data"] * job.mesh.shape["fsdp"]
    batch = job.dataset.take(0, 1)
    return jax.tree.map(lambda a: np.zeros((ways, *a.shape[1:]), a.dtype), batch)


def start(job: Job, checkpoints: Checkpoints, declared: Any, shardings: Any, log: Logger, frozen: Any = None) -> Any:
    """The newest checkpoint's state; else fresh, with parameters from `train.init_from` if given."""
    step, source = checkpoints.latest(), job.config.train.init_from
    if step is not None:
        unread = f" (train.init_from={source} is not read)" if source else ""
        log.say(f"resuming from the checkpoint of step {step}{unread}")
        log.event({"event": "resume", "step": step})
        return checkpoints.restore(step, declared)
    kept = transfer.fit(_given(job, Path(source)), declared.params, source) if source else None
    # initialisers compile slowly and run once: on CPU, spare them the compiler's optimizations
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    init = jax.jit(job.method.init, out_shardings=shardings, compiler_options=options)
    outside = () if frozen is None else (jax.device_put(frozen, on_device(shardings.frozen)),)
    state = init(jax.random.fold_in(jax.random.key(job.config.seed), 0), example_batch(job), *outside)
    if kept is None:
        log.say("starting afresh")
        return state
    log.say(f"starting from the parameters of {source}: {transfer.report(kept, declared.params)}")
    copies = [name for name in ("params", "ema", "target") if getattr(state, name, None) is not None]
    taken = {name: transfer.put(kept, state.params) for name in copies}
    return jax.device_put(state.replace(**taken), shardings)


def _given(job: Job, source: Path) -> dict[str, Any]:
    """The parameters of `train.init_from` by name."""
    kind = job.config.train.init_kind
    return export.read_average(source) if kind == "run" else by_name(teachers.read_public(source, kind, job.model)[1])


def given(job: Job, source: Path, kind: str, declared: Any) -> Any:
    """The parameters of a run or of public weights: `train.init_from` and `train.init_kind`."""
    if kind == "run":
        return export.read(source, jax.eval_shape(job.method.export, declared)).ema
    return teachers.public(source, kind, job.model, declared.params)


def newest(workdir: Path, declared: Any) -> Any:
    """The whole state of a run's newest checkpoint."""
    folder = Path(workdir).absolute() / "checkpoints"
    if not begun(folder):
        raise FileNotFoundError(f"no checkpoint in {folder}: this needs the whole state of a run, not only its export")
    checkpoints = Checkpoints(folder)
    try:
        return checkpoints.restore(checkpoints.latest() or 0, declared)
    finally:
        checkpoints.close()


def report(job: Job, declared: Any, log: Logger) -> None:
    """What is about to run and what it will hold on each device."""
    parameters = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(getattr(declared, "params", declared)))
    held = [
        name
        for name in ("params", "opt_state", "ema", "target", "score", "score_opt_state", "frozen")
        if getattr(declared, name, None)
    ]
    sizes = ", ".join(f"{name} {bytes_per_device(getattr(declared, name)) / 2**20:.1f} MiB" for name in held)
    mesh = " x ".join(f"{name} {size}" for name, size in job.mesh.shape.items())
    log.say(f"{parameters:,} parameters; per device: {sizes}; mesh {mesh} on {jax.devices()[0].platform}")
    log.say(f"data: {job.dataset.name}, {job.dataset.size:,} examples of shape {job.dataset.image_shape}")


# ------------------------------------------------------------------------------------------ the loop


def loop(
    job: Job, state: Any, first: int, shardings: Any, checkpoints: Checkpoints, log: Logger, stop: Stop, root: Path
) -> Result:
    """Steps `first` to the end, or to a stop; every state that leaves here is saved."""
    c, batch_size = job.config.train, job.config.data.batch_size
    base = jax.random.fold_in(jax.random.key(job.config.seed), 1)
    guard = Guard(jnp.int32(0), jnp.int32(-1))
    run = guarded_step(job, shardings)
    pending: list[Any] = []
    metrics: dict[str, Any] = {}
    samplers: dict[str, Any] = {}
    distance: float | None = None
    step, mark, saved, stopped, clock = first, first, first, False, time.monotonic()
    here = (jax.process_index(), jax.process_count())
    workers = job.config.data.workers or None
    with prefetch(job.dataset, first, batch_size, *here, stop_step=c.steps, workers=workers) as batches:
        for local in batches:
            batch = global_batch(local, job.mesh)
            if step == first:
                run = compile_step(run, (state, guard, batch, base, jnp.int32(0)), stop, log)
                clock = time.monotonic()
            state, guard, values = run(state, guard, batch, base, jnp.int32(step))
            step += 1
            pending.append(values)
            log.progress(step)
            if step % c.log_every == 0 or step == c.steps:
                check_finite(job, state, guard, base, log)
                rate = (step - mark) / max(time.monotonic() - clock, 1e-9)
                left = (c.steps - step) / rate / 60
                log.scalars(step, {**mean(pending), "steps_per_second": rate, "minutes_left": left})
                pending, mark, clock = [], step, time.monotonic()
            stopped, distance = stop.asked(step), None
            if not stopped and c.eval_every and step % c.eval_every == 0:
                run_eval = samplers.setdefault("random", sampler(job))
                record = evaluate(job, state, stop=partial(stop.asked, step), run=run_eval)
                stopped = record is None
                if record is not None:
                    metrics, distance = record, note_evaluation(log, step, record, root)
            if not stopped and c.sample_every and step % c.sample_every == 0:
                draw(job, state, step, log, samplers)
            if stopped or step == c.steps:
                break
            if step % c.save_every == 0:
                check_finite(job, state, guard, base, log)
                save(job, checkpoints, step, state, distance)
                saved = step
    check_finite(job, state, guard, base, log)
    if step > saved:
        save(job, checkpoints, step, state, distance)
    checkpoints.wait()
    exported = fetch(job.method.export(state))
    if jax.process_index() == 0:
        export.write(root, exported)
    if stopped:
        log.say(f"{stop.signal or 'stop'} received: step {step} is saved in {root}; run the same command to go on")
    else:
        draw(job, state, step, log, samplers)
        log.say(f"done: {step} steps, exported to {root / 'export.safetensors'}")
    return Result(state, step, stopped, metrics)


def compile_step(run: Any, arguments: tuple, stop: Stop, log: Logger) -> Any:
    """The program of a step, compiled once; another shape later would be an error, not a second compilation."""
    begun = time.monotonic()
    program = stop.during(lambda: run.lower(*arguments).compile(), "compilation")
    log.say(f"compiled the training step in {time.monotonic() - begun:.1f} s")
    return program


def guarded_step(job: Job, shardings: Any) -> Any:
    """The method's step, jitted, with a guard: a step with a non-finite metric leaves the state as it was.

    The gradient norm is among the metrics, so a single bad gradient shows. With the policy "stop" every later step
    leaves the state too, so that what led to the bad step can still be looked at.
    """
    stops = job.config.train.on_nonfinite == "stop"
    held = ("frozen",) if job.frozen else ()  # never changed, and perhaps on the host

    def run(state: Any, guard: Guard, batch: Any, base: Array, step: Array) -> tuple[Any, Guard, Any]:
        with jax.sharding.use_abstract_mesh(job.mesh.abstract_mesh):  # for layers.along_batch
            new, metrics = job.method.step(state, batch, jax.random.fold_in(base, step))
        fine = jnp.stack([jnp.isfinite(value).all() for value in metrics.values()]).all()
        fine = fine & (guard.count == 0) if stops else fine
        kept = jax.tree.map(lambda a, b: jnp.where(fine, a, b), moving(new), moving(state))
        kept = kept.replace(step=new.step, **{name: getattr(state, name) for name in held})
        first = jnp.where(~fine & (guard.count == 0), step, guard.first)
        return kept, Guard(guard.count + (~fine).astype(jnp.int32), first), metrics

    def moving(state: Any) -> Any:
        return state.replace(**dict.fromkeys(held))

    everywhere = NamedSharding(job.mesh, PartitionSpec())
    return jax.jit(run, out_shardings=(shardings, everywhere, everywhere), donate_argnums=(0, 1))


def check_finite(job: Job, state: Any, guard: Guard, base: Array, log: Logger) -> None:
    """Stop, or report, when a step was not finite."""
    count, step = (int(x) for x in jax.device_get((guard.count, guard.first)))
    if not count:
        return
    if job.config.train.on_nonfinite == "skip":
        log.say(f"skipped {count} non-finite step(s) so far, the first was step {step + 1}")
        log.event({"skipped": count, "first_step": step + 1})
        return
    raise NonFinite(
        f"a value became NaN or infinite at step {step + 1}, first in {blame(job, state, step, base)}. The last "
        "checkpoint is from before it; lower the learning rate, set optim.clip, or set train.on_nonfinite='skip'"
    )


def blame(job: Job, state: Any, step: int, base: Array) -> str:
    """The first non-finite array of a step: it is run again, being a function of what is still here."""
    local = job.dataset.batch(step, job.config.data.batch_size, jax.process_index(), jax.process_count())
    batch = global_batch(local, job.mesh)
    new, metrics = jax.jit(job.method.step)(state, batch, jax.random.fold_in(base, step))
    leaves = jax.tree_util.tree_leaves_with_path({"1 batch": batch, "2 state": new, "3 metrics": metrics})
    floats = [(path_name(path[1:]), x) for path, x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
    return next((name for name, x in floats if not jnp.isfinite(x).all()), "its metrics")


def save(job: Job, checkpoints: Checkpoints, step: int, state: Any, distance: float | None) -> None:
    """A checkpoint, unless the step that led to it ruined the parameters while its metrics were still finite."""
    leaves = jax.tree_util.tree_leaves_with_path(job.method.export(state))
    bad = [path_name(path) for path, leaf in leaves if not all(np.isfinite(s.data).all() for s in _local(leaf))]
    if multihost_utils.process_allgather(np.array(len(bad))).any():
        raise NonFinite(
            f"{bad[0] if bad else 'an array'} is NaN or infinite after step {step}, though the step's metrics were "
            "finite; it was not saved. The last checkpoint is from before it; lower the learning rate"
        )
    checkpoints.save(step, state, None if distance is None else {"distance": distance})


def _local(leaf: Array) -> list[Any]:
    """The parts of a global array that this process must look at, each once."""
    return [shard for shard in leaf.addressable_shards if shard.replica_id == 0]


def mean(pending: list[Any]) -> dict[str, float]:
    """Means of the finite values since the last log line."""
    fetched = jax.device_get(pending)
    columns = {name: np.array([float(values[name]) for values in fetched]) for name in fetched[0]}
    finite = {name: column[np.isfinite(column)] for name, column in columns.items()}
    return {name: float(column.mean()) for name, column in finite.items() if len(column)}


def note_evaluation(log: Logger, step: int, record: dict[str, Any], root: Path) -> float:
    """Log an evaluation, append it to evaluations.jsonl, and return its main distance."""
    values = {name: value for name, value in record.items() if isinstance(value, float)}
    log.scalars(step, {f"eval/{name}": value for name, value in values.items()})
    if jax.process_index() == 0:
        evaluation.write(root / "evaluations.jsonl", {"step": step, **record})
    return next(iter(values.values()))


def draw(job: Job, state: Any, step: int, log: Logger, samplers: dict[str, Any]) -> None:
    """A grid of samples, the classes in turn, or captioned."""
    if len(job.dataset.image_shape) != 3 or not job.config.sample.count:
        return
    run = samplers.setdefault("cycle", sampler(job, "cycle"))
    parts = sample(job, state, job.config.sample.count, job.config.seed, run=run)
    texts = captions(job, job.config.sample.count) if job.dataset.encode else []
    log.images(step, np.concatenate([images for images, _ in parts]), captions=texts)
