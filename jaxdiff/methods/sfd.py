"""SFD and SFD-v: a teacher distilled into a few Euler steps (Zhou et al., NeurIPS 2024).

Only the timestamps t_0 > ... > t_{n-1} that sampling visits are trained; no data are used. One iteration:

    n          drawn from a list (SFD-v; one n: SFD); n timestamps are n - 1 steps, n - 2 evaluations with AFS
    x_0        t_0 eps, eps ~ N(0, I); labels uniform
    targets    y_1..y_{n-1}: the teacher's states at the student's timestamps; it runs a better solver over K
               sub-steps per student step, without gradient and without restarting its history
    walk       for k = 0..n-2, on the student's own states, the network conditioned on n (SFD-v):
                   x_{k+1} = (t_{k+1}/t_k) x_k + (1 - t_{k+1}/t_k) D(x_k, t_k)
                   loss    = sum |x_{k+1} - y_{k+1}| over pixels, mean over the batch
                   one optimizer update; x_{k+1}, from before that update, is the next input, without gradient
    AFS        step 0 takes D = x (1 - t_0 / sqrt(1 + t_0^2)) instead of the network: nothing to train, no update

Second stage, to one evaluation: the teacher is such a student walking its own grid (solver "euler", `teacher_afs`,
`teacher_step` = its n), the student n = 3 with K = 3 and L1 + LPIPS.

The learning rate falls by iterations, not by updates, so it is a factor `rate(iteration)` on constant-rate updates.
Non-finite gradients are left to show, for the trainer to stop or skip; the authors' code replaces them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import struct
from jax import Array

from jaxdiff import denoisers, solvers
from jaxdiff.denoisers import Cond, Denoiser
from jaxdiff.errors import pick
from jaxdiff.methods import ema as ema_lib
from jaxdiff.methods.method import (
    Batch,
    Method,
    Metrics,
    accumulate,
    adopt,
    cond_of,
    data_of,
    draw_labels,
    in_loops,
    pseudo_huber,
    update,
)
from jaxdiff.methods.walks import EULER, Grid, check_walks, default_grid, make_plan, teacher_states
from jaxdiff.models import network
from jaxdiff.solvers import Solver, analytic_first_step


@struct.dataclass
class State:
    """Everything that must survive a restart; `ema` is None unless an average is asked for."""

    step: Any  # iterations done
    params: Any
    ema: Any
    opt_state: Any
    frozen: Any  # {"teacher": parameters, "lpips": parameters}: held, never trained


# ------------------------------------------------------------------------------------------ losses


def _l1(a: Array, b: Array) -> Array:
    return jnp.abs(a - b).reshape(a.shape[0], -1).sum(1)


def _l2(a: Array, b: Array) -> Array:
    return jnp.square(a - b).reshape(a.shape[0], -1).sum(1)


LOSSES: dict[str, Callable[[Array, Array], Array]] = {"l1": _l1, "l2": _l2, "pseudo_huber": pseudo_huber}
Perceptual = Callable[[Any, Array, Array], Array]  # (frozen parameters, a, b) -> distance per example


def make_loss(name: str, perceptual: Perceptual | None = None) -> Callable[[Any, Array, Array], Array]:
    """(frozen, a, b) -> loss per example. "lpips" alone, or "l1+lpips": L1 + dimensions * LPIPS, equal as means."""
    names = name.split("+")
    for part in names:
        pick({**LOSSES, "lpips": None}, part, "SFD loss (two are joined by +, as in l1+lpips)")
    if "lpips" in names and perceptual is None:
        raise ValueError(f"the loss {name!r} needs LPIPS weights; without them use one of {', '.join(LOSSES)}")

    def total(frozen: Any, a: Array, b: Array) -> Array:
        terms = [LOSSES[part](a, b) for part in names if part != "lpips"]
        if perceptual is not None and "lpips" in names:
            terms.append(math.prod(a.shape[1:]) * perceptual(frozen["lpips"], a, b))
        return jnp.stack(terms).sum(0)

    return total


# ------------------------------------------------------------------------------------------ the student's walk

Gap = Callable[..., tuple[Array, tuple[Array, Array]]]  # (params, examples, step) -> loss, (next x, mean distance)


def walk_student(
    gap: Gap,
    optimizer: optax.GradientTransformation,
    carry: Any,
    steps: Any,
    count: Any,
    cond: Cond = None,
    factor: Any = 1.0,
    parts: int = 1,
) -> tuple[Any, Metrics]:
    """One update a step, each step's input the detached output of the one before: (params, opt_state, x), metrics.

    `carry` is (params, opt_state, x); `steps` holds one entry a step in every array, with `index`, `target` and what
    `gap` needs. A step whose index is not below `count` changes nothing and costs nothing.
    """
    fixed = {} if cond is None else {"cond": cond}

    def train(carry: Any, step: Any) -> tuple[Any, Metrics]:
        params, opt_state, x = carry

        def gradient(params: Any, examples: Any, part: Any) -> tuple[Any, Array]:
            now = {**step, "part": part}
            (loss, (after, distance)), gradients = jax.value_and_grad(gap, has_aux=True)(params, examples, now)
            return (loss, distance, gradients), after

        (loss, distance, gradients), after = accumulate(
            gradient, params, {"x": x, "target": step["target"], **fixed}, parts
        )
        params, opt_state = update(optimizer, gradients, opt_state, params, factor)
        metrics = {"loss": loss, "distance": distance, "grad_norm": optax.tree.norm(gradients)}
        return (params, opt_state, after), metrics

    def maybe(carry: Any, step: Any) -> tuple[Any, Metrics]:
        zero = dict.fromkeys(("loss", "distance", "grad_norm"), jnp.float32(0))
        return jax.lax.cond(step["index"] < count, train, lambda c, _: (c, zero), carry, step)

    return jax.lax.scan(train if isinstance(count, int) else maybe, carry, steps)


# ------------------------------------------------------------------------------------------ the method


def sfd(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    *,
    nfe: Sequence[int] = (2,),
    afs: bool = True,
    grid: Grid = default_grid,
    substeps: int = 4,
    solver: str | Solver = "dpmpp3m",
    teacher: Callable[[Any], Denoiser] | None = None,
    teacher_afs: bool = False,
    teacher_step: int = 0,
    wrapper: Callable[..., Denoiser] = denoisers.edm,
    condition: str = "steps",
    loss: str = "l1",
    perceptual: Perceptual | None = None,
    dropout: bool = True,
    guidance: float = 1.0,
    sample_guidance: float = 1.0,
    null: Cond = None,
    sample_nfe: int | None = None,
    rate: Callable[[Array], Any] = lambda iteration: 1.0,
    decay: ema_lib.Decay | None = None,
    parts: int = 1,
    place: Callable[[Array], Array] = lambda x: x,
) -> Method:
    """Distil a teacher into `wrapper(network)` walked by Euler at the evaluations listed in `nfe`.

    `init(key, batch, frozen)` takes {"teacher": its parameters}, and the student starts from them. Of the batch only
    shapes and conditions other than labels are used. `teacher` makes a denoiser of those parameters; the default is
    the model itself. With another architecture the student starts from {"student": parameters} or untrained; an
    analytic teacher ignores its parameters: `teacher=lambda _: denoise` with {"teacher": {}}.
    `sample(state, noise, cond, nfe=...)` takes any number of evaluations of the list.

    condition   "steps": cond["step"] = n; "next": ln(t_{k+1}) / 4. Used when the model has `step_embed`
    guidance    scale of the teacher in training, which the student then takes over; the paper leaves it at 1 and
                guides the student when sampling: `sample_guidance`
    decay       an average of the parameters to sample with; the paper keeps none
    parts       gradients are accumulated over slices of the batch
    place       a sharding constraint for arrays drawn here that go along the batch; without it a compiler that sees
                no sharded input has every device do all the work
    """
    solver = solvers.make(solver) if isinstance(solver, str) else solver
    timestamps = check_walks(nfe, afs, substeps, solver)
    pick({"steps": 0, "next": 0}, condition, "SFD condition")
    plan, grids = make_plan(timestamps, grid, substeps, solver, condition)
    default_nfe = _check_nfe(max(nfe) if sample_nfe is None else sample_nfe, nfe)
    criterion, own = make_loss(loss, perceptual), teacher is None
    check_second_stage(timestamps, substeps, teacher_step)
    if guidance != 1.0 and not null:
        raise ValueError(f"guidance={guidance} needs null values, for example null={{'label': num_classes}}")
    guide_model = teacher_model(model, teacher_step)
    teacher = teacher or (lambda params: wrapper(network(guide_model, params)))
    looped = in_loops(model)
    conditioned = bool(getattr(model, "step_embed", ""))
    longest, several = max(timestamps) - 1, len(timestamps) > 1

    def given(cond: Cond, value: Any, examples: int) -> Cond:
        return {**(cond or {}), "step": jnp.full(examples, value, jnp.float32)} if conditioned else cond

    def init(key: Array, batch: Batch, frozen: Mapping[str, Any]) -> State:
        x0 = data_of(batch)
        fresh = model.init(key, x0, jnp.ones(x0.shape[0]), given(cond_of(batch), 0.0, x0.shape[0]))["params"]
        params = adopt(fresh, frozen.get("student", frozen["teacher"] if own else {}))
        average = None if decay is None else jax.tree.map(jnp.copy, params)
        held = {name: jax.tree.map(jnp.copy, value) for name, value in frozen.items() if name != "student"}
        return State(jnp.int32(0), params, average, optimizer.init(params), held)

    def targets(frozen: Any, x: Array, cond: Cond, rows: Any, count: Any) -> Array:
        denoise = teacher(frozen["teacher"])
        if guidance != 1.0:
            denoise = denoisers.guided(denoise, guidance, null)
        if teacher_step:
            cond = {**(cond or {}), "step": jnp.full(x.shape[0], float(teacher_step))}
        return teacher_states(denoise, x, rows, count, solver, cond, teacher_afs)

    def step(state: State, batch: Batch, key: Array) -> tuple[State, Metrics]:
        keys = dict(zip(("choice", "noise", "label", "dropout"), jax.random.split(key, 4), strict=True))
        shape = data_of(batch).shape
        choice = jax.random.randint(keys["choice"], (), 0, len(timestamps)) if several else 0
        walk = jax.tree.map(lambda a: jnp.asarray(a, _narrow(a))[choice], plan._replace(timestamps=()))
        count = walk.steps if several else longest
        cond = draw_labels(keys["label"], cond_of(batch), model, shape[0], place)
        x = walk.start * place(jax.random.normal(keys["noise"], shape, jnp.float32))

        def gap(params: Any, examples: Any, step: Any) -> tuple[Array, tuple[Array, Array]]:
            key = jax.random.fold_in(jax.random.fold_in(keys["dropout"], step["index"]), step["part"])
            denoise = wrapper(network(looped, params, key if dropout else None))
            cond = given(examples.get("cond"), step["value"], examples["x"].shape[0])
            after, _ = EULER.step(denoise, denoise, cond, examples["x"], (), step["row"], None)
            difference = criterion(state.frozen, after, examples["target"]).mean()
            return difference, (after, jnp.abs(after - examples["target"]).mean())

        steps = {"index": jnp.arange(longest), "row": walk.student, "value": walk.value}
        steps["target"] = targets(state.frozen, x, cond, walk.teacher, count)
        if afs:
            first = jax.tree.map(lambda a: a[0], walk.student)
            x, _ = EULER.step(analytic_first_step, analytic_first_step, None, x, (), first, None)
            steps = jax.tree.map(lambda a: a[1:], steps)
        carry = (state.params, state.opt_state, x)
        (params, opt_state, _), seen = walk_student(gap, optimizer, carry, steps, count, cond, rate(state.step), parts)
        trained, done = count - int(afs), state.step + 1
        evaluations = jnp.asarray(trained, jnp.float32)
        metrics = {name: seen[name].sum() / evaluations for name in ("loss", "grad_norm")}
        metrics |= {"end_distance": seen["distance"][trained - 1], "nfe": evaluations}
        average = state.ema if decay is None else ema_lib.average(decay(done, shape[0]), state.ema, params)
        return State(done, params, average, opt_state, state.frozen), metrics

    def denoiser(state: State) -> Denoiser:
        return wrapper(network(model, state.params if state.ema is None else state.ema))

    def sample(
        state: State, noise: Array, cond: Cond = None, key: Array | None = None, nfe: int = default_nfe
    ) -> Array:
        n = _check_nfe(nfe, [n - 1 - afs for n in timestamps]) + 1 + afs
        inner, values = denoiser(state), jnp.asarray(plan.value[timestamps.index(n)], jnp.float32)

        def denoise(x: Array, sigma: Any, cond: Cond = None) -> Array:
            above = jnp.asarray(np.log(grids[n]) - 1e-3, x.dtype)
            passed = jnp.sum(jnp.log(jnp.max(sigma)) < above)  # timestamps before this one
            return inner(x, sigma, given(cond, values[passed], x.shape[0]))

        guide = denoisers.guided(denoise, sample_guidance, null) if sample_guidance != 1.0 and null else denoise
        return solvers.solve(guide, grids[n][0] * noise, grids[n], EULER, cond, afs=afs)

    def export(state: State) -> State:
        return State(state.step, None, state.params if state.ema is None else state.ema, None, None)

    return Method(init, step, sample, denoiser, export, averages=decay is not None)


def _check_nfe(nfe: int, known: Sequence[int]) -> int:
    if nfe not in known:
        raise ValueError(f"this student is made for {', '.join(map(str, known))} evaluations, got {nfe}")
    return nfe


def check_second_stage(timestamps: Sequence[int], substeps: int, teacher_step: int) -> None:
    """A teacher that is told how many timestamps it walks must walk so many."""
    for n in timestamps:
        if teacher_step and substeps * (n - 1) + 1 != teacher_step:
            raise ValueError(
                f"the teacher is told {teacher_step} timestamps (teacher_step), but with {substeps} sub-steps for each "
                f"of {n - 1} student steps it walks {substeps * (n - 1) + 1}; change substeps or teacher_step"
            )


def teacher_model(model: Any, teacher_step: int) -> Any:
    """The student's own architecture, without the step condition unless the teacher has it too."""
    conditioned = bool(getattr(model, "step_embed", ""))
    if teacher_step and not conditioned:
        raise ValueError(f"teacher_step={teacher_step} is a condition of the teacher, but the model has no step_embed")
    return model.clone(step_embed="") if conditioned and not teacher_step else model


def _narrow(array: np.ndarray) -> Any:
    return jnp.int32 if array.dtype.kind == "i" else jnp.float32
