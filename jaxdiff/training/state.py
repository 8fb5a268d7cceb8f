"""The state of a run on its mesh: declared, restored or initialised, stepped with a guard, inspected when it fails."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdiff import compilation, flops
from jaxdiff.data import Dataset
from jaxdiff.methods import TrainState
from jaxdiff.methods.method import Batch, Metrics, averaged
from jaxdiff.models.low_rank import Adapters
from jaxdiff.placement import ways
from jaxdiff.training import parameters, transfer
from jaxdiff.training.build import Run, build
from jaxdiff.training.checkpoint import Checkpoints
from jaxdiff.training.logs import Logger
from jaxdiff.training.sharding import (
    bytes_per_device,
    global_batch,
    on_device,
    sizes_of,
    state_shardings,
    with_shardings,
)
from jaxdiff.training.stop import Stop
from jaxdiff.trees import Tree, path_name, size_of

Step: TypeAlias = Any  # a jitted or compiled training step


class NonFinite(RuntimeError):
    """A value became NaN or infinite during training."""


@struct.dataclass
class Guard:
    """The number of non-finite steps, and the first one."""

    count: Tree
    first: Tree


# ------------------------------------------------------------------------------------------ start


def declare(run: Run, mesh: Mesh) -> TrainState:
    """The shapes and shardings of the state; nothing is computed."""
    frozen = {name: part.shapes() for name, part in run.method.frozen.items()}
    abstract = jax.eval_shape(run.method.init, jax.random.key(0), example_batch(run, mesh), frozen)
    shardings = state_shardings(abstract, mesh, run.config.mesh.min_size, run.config.teacher.offload)
    return with_shardings(abstract, shardings)


def shardings_of(declared: Tree) -> Tree:
    """The shardings alone."""
    return jax.tree.map(lambda leaf: leaf.sharding, declared)


def example_batch(run: Run, mesh: Mesh) -> dict[str, np.ndarray]:
    """A batch of zeros with the shapes of the data, one example per device."""
    return run.example(ways(mesh))


def read_frozen(run: Run) -> dict[str, Tree]:
    """The external arrays of the method's init, such as a teacher's parameters, on the host."""
    return {name: part.load() for name, part in run.method.frozen.items()}


def has_checkpoint(checkpoints: Path) -> bool:
    """Whether the folder has a checkpoint."""
    return checkpoints.is_dir() and any(path.name.isdigit() for path in checkpoints.iterdir())


def start(
    run: Run, mesh: Mesh, checkpoints: Checkpoints, declared: TrainState, log: Logger, frozen: Mapping[str, Tree]
) -> TrainState:
    """The state of the newest checkpoint, or a fresh one, with parameters from `train.init_from` if given."""
    step, source = checkpoints.latest(), run.config.train.init_from
    if step is not None:
        unread = f" (train.init_from={source} is ignored)" if source else ""
        log.say(f"resuming from the checkpoint of step {step}{unread}")
        log.event({"event": "resume", "step": step})
        return checkpoints.restore(step, declared)
    held = "base" in frozen  # train.init_from is the base of low-rank updates
    kept = load_params(run, declared) if source and not held else None
    shardings = shardings_of(declared)
    # initializers compile slowly and run once: on CPU, skip the compiler's optimizations
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    init = jax.jit(run.method.init, out_shardings=shardings, compiler_options=options)
    outside = jax.device_put(frozen, {name: on_device(shardings.frozen[name]) for name in frozen})
    key = jax.random.fold_in(jax.random.key(run.config.seed), 0)
    state = init(key, example_batch(run, mesh), outside)
    if kept is None:
        begun = f"starting adapters of {source}" if held else origin(run)
        for note in (begun, *run.method.notes):
            log.say(note)
        return state
    student = declared.params["student"]
    log.say(f"starting from the parameters of {source}: {transfer.report(kept, student)}")
    begin = {name: transfer.put(kept, tree) for name, tree in state.averages.items()}
    params = {**state.params, "student": transfer.put(kept, state.params["student"])}
    state = state.replace(params=params, averages=begin)
    return jax.device_put(state, shardings)


def origin(run: Run) -> str:
    """Where the parameters of a new run come from."""
    teacher = run.config.teacher
    if "teacher" not in run.method.frozen:
        return "starting from scratch"
    other = teacher.kind == "analytic" or (teacher.kind == "python" and not teacher.own)
    if other or (teacher.fields and teacher.fields != run.config.model.fields):
        return f"the student starts untrained: the teacher ({teacher.kind}) has another network"
    return "the student starts from the teacher's parameters"


def load_params(run: Run, declared: TrainState) -> dict[str, np.ndarray]:
    """The parameters of `train.init_from` that match the network, by name."""
    c = run.config.train
    loaded = parameters.read(c.init_from, c.init_kind, run.model)
    parameters.check_convention(loaded, run.convention, rescaled=True)
    return transfer.fit(loaded.arrays, declared.params["student"], c.init_from)


@contextmanager
def kept(workdir: Path, metric: str = "") -> Iterator[Checkpoints]:
    """The checkpoints of a run, to read."""
    folder = Path(workdir).absolute() / "checkpoints"
    if not has_checkpoint(folder):
        raise FileNotFoundError(f"no checkpoint in {folder}: this needs a run's full state, not only its export")
    checkpoints = Checkpoints(folder, metric=metric, read_only=True)
    try:
        yield checkpoints
    finally:
        checkpoints.close()


def kept_step(workdir: Path, wanted: str, metric: str) -> int:
    """The step of a kept checkpoint: "best" by `metric`, or a number."""
    with kept(workdir, metric) as checkpoints:
        steps, best = checkpoints.steps(), checkpoints.best() if wanted == "best" else None
    if wanted == "best":
        if best is None:
            raise ValueError(
                f"no kept checkpoint of {workdir} has been evaluated by {metric}; set train.eval_every to a multiple "
                f"of train.save_every, or choose one of the steps {', '.join(map(str, steps))}"
            )
        return best
    if not wanted.isdigit() or int(wanted) not in steps:
        raise ValueError(f"step {wanted} of {workdir} is not kept; choose best or one of {', '.join(map(str, steps))}")
    return int(wanted)


def at(workdir: Path, declared: TrainState, step: int | None = None) -> TrainState:
    """The full state of a run's checkpoint of that step, by default the newest."""
    with kept(workdir) as checkpoints:
        return checkpoints.restore(checkpoints.latest() or 0 if step is None else step, declared)


def report(run: Run, mesh: Mesh, declared: TrainState, log: Logger) -> None:
    """Log what is about to run and its memory per device."""
    sizes = []
    for name in ("params", "opt_state", "averages", "frozen"):
        for key, tree in getattr(declared, name).items():
            label = key if name in ("averages", "frozen") else f"{name}/{key}"
            sizes.append(f"{label} {bytes_per_device(tree) / 2**20:.1f} MiB")
    count = size_of(declared.params["student"])
    shape = " x ".join(f"{name} {size}" for name, size in sizes_of(mesh).items())
    rest = ""
    if isinstance(declared.params["student"], Adapters):
        base = declared.frozen[declared.params["student"].base]
        rest = f" of low-rank updates of {size_of(base):,} frozen ones"
    log.say(f"{count:,} parameters{rest}; per device: {', '.join(sizes)}; mesh {shape} on {jax.devices()[0].platform}")
    log.say(f"data: {run.data.name}, {run.data.size:,} examples of shape {run.data.shape}")
    taken = ", ".join(run.conditions) or "nothing"
    unused = [name for name in run.data.signals if name in ("label", "text") and name not in run.conditions]
    missing = f"; {' and '.join(unused)} of the data unused: the network does not declare it" if unused else ""
    log.say(f"conditioned on {taken}{missing}")


# ------------------------------------------------------------------------------------------ steps


def compile_step(step: Step, arguments: tuple, stop: Stop, log: Logger) -> Step:
    """The compiled training step; other shapes later are an error, not a recompilation."""
    log.say("compiling the training step ...")
    begun = time.monotonic()
    program = stop.during(lambda: step.lower(*arguments).compile(), "compilation")
    log.say(f"compiled the training step in {time.monotonic() - begun:.1f} s")
    return program


def model_flops(run: Run, mesh: Mesh, step: Step, arguments: tuple) -> int:
    """FLOPs of the model in one step, over all devices: those of the same step without recomputation."""
    if run.config.model.remat:
        plain = run.config.copy_and_resolve_references()
        with plain.unlocked():
            plain.model.remat = ""
        step = guarded_step(build(plain, run.data), mesh, shardings_of(arguments[0]))
    return flops.total(step.trace(*arguments).jaxpr.jaxpr)


def guarded_step(run: Run, mesh: Mesh, shardings: Tree) -> Step:
    """The method's step, jitted, with a guard: a step with a non-finite metric leaves the state unchanged.

    The gradient norm is among the metrics, so any bad gradient is detected. With the policy "stop", later steps leave
    the state unchanged too, so that the bad step can be rerun and inspected.
    """
    stops = run.config.train.on_nonfinite == "stop"

    def step(state: TrainState, guard: Guard, batch: Batch, base: Array, number: Array) -> tuple[Tree, Guard, Metrics]:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # for placement.along_batch
            new, metrics = run.method.step(state, batch, jax.random.fold_in(base, number))
        fine = jnp.stack([jnp.isfinite(value).all() for value in metrics.values()]).all()
        if stops:
            fine = fine & (guard.count == 0)
        kept = jax.tree.map(lambda a, b: jnp.where(fine, a, b), _moving(new), _moving(state))
        kept = kept.replace(step=new.step, frozen=state.frozen)  # never changes, and may be in host memory
        first = jnp.where(~fine & (guard.count == 0), number, guard.first)
        return kept, Guard(guard.count + (~fine).astype(jnp.int32), first), metrics

    everywhere = NamedSharding(mesh, PartitionSpec())
    options = compilation.options(mesh.devices.flat[0].platform, run.config.mesh.gather_first)
    outputs = (shardings, everywhere, everywhere)
    return jax.jit(step, out_shardings=outputs, donate_argnums=(0, 1), compiler_options=options)


def _moving(state: TrainState) -> Tree:
    return state.replace(frozen={})  # type: ignore[attr-defined]


def check_finite(
    run: Run, mesh: Mesh, dataset: Dataset, state: TrainState, guard: Guard, base: Array, log: Logger
) -> None:
    """Raise or report, by policy, if a step was not finite."""
    count, step = (int(x) for x in jax.device_get((guard.count, guard.first)))
    if not count:
        return
    if run.config.train.on_nonfinite == "skip":
        log.say(f"skipped {count} non-finite step(s) so far, first at step {step + 1}")
        log.event({"skipped": count, "first_step": step + 1})
        return
    where = first_nonfinite(run, mesh, dataset, state, step, base)
    raise NonFinite(
        f"a value became NaN or infinite at step {step + 1}, first in {where}. The last checkpoint precedes it; "
        "lower the learning rate, set optim.clip, or set train.on_nonfinite='skip'"
    )


def first_nonfinite(run: Run, mesh: Mesh, dataset: Dataset, state: TrainState, step: int, base: Array) -> str:
    """The name of the first non-finite array of a step, found by rerunning it.

    The state is donated, as in the step itself: the run ends here, and there may be no memory for a second one.
    """
    local = dataset.batch(step, run.config.data.batch_size, jax.process_index(), jax.process_count())
    batch = global_batch(run.select(local), mesh)
    bad = _first_bad(batch)
    if bad:
        return bad
    new, metrics = jax.jit(run.method.step, donate_argnums=0)(state, batch, jax.random.fold_in(base, step))
    return _first_bad(new) or _first_bad(metrics) or "its metrics"


def _first_bad(tree: Tree) -> str:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if jnp.issubdtype(leaf.dtype, jnp.floating) and not jnp.isfinite(leaf).all():
            return path_name(path)
    return ""


def save(checkpoints: Checkpoints, step: int, state: TrainState, metrics: dict[str, float] | None) -> None:
    """Save a checkpoint, unless parameters became non-finite in a step whose metrics were still finite."""
    leaves = jax.tree_util.tree_leaves_with_path(averaged(state))
    bad = [path_name(path) for path, leaf in leaves if not all(np.isfinite(s.data).all() for s in _local(leaf))]
    if multihost_utils.process_allgather(np.array(len(bad))).any():
        raise NonFinite(
            f"{bad[0] if bad else 'an array'} is NaN or infinite after step {step}, though the step's metrics were "
            "finite; it was not saved. The last checkpoint precedes it; lower the learning rate"
        )
    checkpoints.save(step, state, metrics)


def _local(leaf: Array) -> list[jax.Shard]:
    """The shards of a global array that this process holds, without replicas."""
    return [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
