"""SFD and SFD-v: a teacher distilled into a few Euler steps (Zhou et al., NeurIPS 2024).

Training visits only the timestamps t_0 > ... > t_{n-1} that sampling uses, and needs no data. One iteration:

    n          drawn from a list (SFD-v; a single n: SFD); n timestamps give n - 1 steps, n - 2 evaluations with AFS
    x_0        t_0 eps, eps ~ N(0, I); labels uniform
    targets    y_1..y_{n-1}: the teacher's states at the student's timestamps; it runs a more accurate solver with
               K sub-steps per student step, without gradients and without resetting its history
    walk       for k = 0..n-2, on the student's own states, the network conditioned on n (SFD-v):
                   x_{k+1} = (t_{k+1}/t_k) x_k + (1 - t_{k+1}/t_k) D(x_k, t_k)
                   loss    = sum |x_{k+1} - y_{k+1}| over pixels, mean over the batch
                   one optimizer update; x_{k+1}, computed before the update and detached, is the next input
    AFS        step 0 takes D = x (1 - t_0 / sqrt(1 + t_0^2)) instead of the network: no update

Second stage, down to one evaluation: the teacher is itself an SFD student on its own grid (solver "euler",
`teacher_afs`, `teacher_step` = its n); the student has n = 3, K = 3 and L1, to which the last step adds LPIPS.

The learning rate decays per iteration, not per update, so it is a factor `rate(iteration)` on constant-rate updates.
Non-finite gradients are kept, for the trainer to stop or skip; the authors' code replaces them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.typing import Dtype
from jax import Array
from jax.typing import ArrayLike
from ml_collections import ConfigDict

from jaxdiff import denoisers, solvers
from jaxdiff.conditions import SEMANTIC, Cond
from jaxdiff.denoisers import Denoiser, Sigma
from jaxdiff.errors import choose
from jaxdiff.methods.method import (
    Batch,
    Examples,
    Method,
    Metrics,
    Parts,
    Teacher,
    TrainState,
    accumulate,
    advance,
    data_of,
    draw_labels,
    init_from_teacher,
    start,
    update,
    with_loop_convs,
)
from jaxdiff.methods.sfd_losses import Criterion, LpipsOptions, Perceptual, make_loss, perceptual_of
from jaxdiff.methods.sfd_schedule import EULER, check_walks, make_schedule, teacher_states
from jaxdiff.placement import along_batch
from jaxdiff.solvers import analytic_first_step
from jaxdiff.trees import Params, Tree


@dataclass(frozen=True)
class Options:
    """Options of `method.name = "sfd"`. The student takes Euler steps on the grid of `sample`."""

    nfe: Sequence[int] = (2,)  # [1, 10000] evaluations it is trained for; several train one student for all (SFD-v)
    substeps: int = 4  # [1, 1000] K: the teacher's steps per student step
    solver: str = "dpmpp3m"  # the teacher's solver
    solver_options: Mapping[str, Any] = field(default_factory=dict)  # its options
    loss: str = "l1"  # l1, l2, pseudo_huber, lpips, l1+lpips (lpips at the last step)
    lpips: LpipsOptions = field(default_factory=LpipsOptions)
    condition: str = "steps"  # cond["step"]: steps (their number) or next (the next timestamp)
    dropout: bool = True  # enable the student's dropout, if the model has any
    guidance: float = 1.0  # (-inf, inf) guidance scale of the teacher, which the student learns; 1: guide when sampling
    teacher_afs: bool = False  # second stage: the teacher's first step is analytic
    teacher_step: int = 0  # [0, 10000] second stage: timestamps the teacher is conditioned on; 0: it is not
    average: bool = False  # sample with an average of the parameters, configured by `ema`


def check_sample(options: Options, sample: ConfigDict) -> None:
    """An SFD student is sampled with Euler steps on the grid it is trained for."""
    if sample.solver != "euler" or sample.final_denoise:
        raise ValueError(
            f"an SFD student is sampled with Euler steps on the grid it is trained for: set sample.solver='euler' and "
            f"sample.final_denoise=False, got {sample.solver!r} and {sample.final_denoise}"
        )
    if sample.timestamps - 1 - sample.afs not in options.nfe:
        known = ", ".join(map(str, options.nfe))
        raise ValueError(
            f"this student is trained for {known} evaluations (sfd.nfe), but sample.timestamps={sample.timestamps} "
            f"takes {sample.timestamps - 1 - sample.afs}; set it to {max(options.nfe, default=1) + 1 + sample.afs}"
        )
    if options.guidance != 1.0 and sample.guidance != 1.0:
        raise ValueError(
            f"the student learns sfd.guidance={options.guidance}, so sample.guidance={sample.guidance} would guide it "
            "twice; set one of them to 1"
        )


# ------------------------------------------------------------------------------------------ the student's steps

Gap = Callable[..., tuple[Array, tuple[Array, Array]]]  # (params, examples, step) -> loss, (next x, mean distance)
Carry: TypeAlias = tuple[Params, Tree, Array]  # params, opt_state, x


def walk_student(
    gap: Gap,
    optimizer: optax.GradientTransformation,
    carry: Carry,
    steps: Examples,
    count: ArrayLike,
    cond: Cond = None,
    factor: ArrayLike = 1.0,
    parts: int = 1,
) -> tuple[Carry, Metrics]:
    """One update per step, on the detached output of the previous step; returns the final carry and metrics.

    Every array of `steps` has one entry per step: `index`, `target` and whatever `gap` needs. Steps with
    index >= `count` are skipped at no cost.
    """
    fixed = {} if cond is None else {"cond": cond}

    def train(carry: Carry, step: Examples) -> tuple[Carry, Metrics]:
        params, opt_state, x = carry

        def gradient(params: Params, examples: Examples, part: ArrayLike) -> tuple[Tree, Array]:
            now = {**step, "part": part}
            (loss, (after, distance)), gradients = jax.value_and_grad(gap, has_aux=True)(params, examples, now)
            return (loss, distance, gradients), after

        examples = {"x": x, "target": step["target"], **fixed}
        (loss, distance, gradients), after = accumulate(gradient, params, examples, parts)
        params, opt_state = update(optimizer, gradients, opt_state, params, factor)
        metrics = {"loss": loss, "distance": distance, "grad_norm": optax.tree.norm(gradients)}
        return (params, opt_state, after), metrics

    def maybe(carry: Carry, step: Examples) -> tuple[Carry, Metrics]:
        zero = dict.fromkeys(("loss", "distance", "grad_norm"), jnp.float32(0))
        return jax.lax.cond(step["index"] < count, train, lambda c, _: (c, zero), carry, step)

    return jax.lax.scan(train if isinstance(count, int) else maybe, carry, steps)


# ------------------------------------------------------------------------------------------ the method


def build(options: Options, parts: Parts, perceptual: Perceptual | None = None) -> Method:
    """Distil a teacher into a network sampled by Euler steps with the numbers of evaluations in `options.nfe`.

    `init(key, batch, frozen)` takes {"teacher": parameters}, from which a student of the same network starts; others
    start from {"student": parameters} or untrained. Only the shapes and the conditioning (except labels) of a batch are
    used. `sample(params, noise, cond, nfe=...)` takes any nfe of the list. `perceptual` replaces the LPIPS network of
    the options.
    """
    if parts.teacher is None:
        raise ValueError("SFD needs a teacher: pass Parts(teacher=...)")
    choose(options.condition, ("steps", "next"), "SFD condition")
    if options.guidance != 1.0 and not parts.cond.has(SEMANTIC):
        raise ValueError(f"guidance={options.guidance} needs a network conditioned on classes or text")
    frozen = {"teacher": parts.teacher.frozen}
    if perceptual is None:
        perceptual, lpips = perceptual_of(options.loss, options.lpips, parts.model, parts.shape)
        if lpips is not None:
            frozen["lpips"] = lpips
    made = FewSteps(options, parts, parts.teacher, make_loss(options.loss, perceptual))
    return Method(made.init, made.step, made.sample, parts.denoiser, frozen)


class FewSteps:
    """The student's schedule, targets and updates."""

    def __init__(self, options: Options, parts: Parts, teacher: Teacher, criterion: Criterion) -> None:
        self.options, self.parts, self.teacher, self.criterion = options, parts, teacher, criterion
        self.afs = parts.sampling.afs
        self.solver = solvers.make(options.solver, **options.solver_options)
        self.timestamps = check_walks(options.nfe, self.afs, options.substeps, self.solver)
        self.schedule, self.grids = make_schedule(
            self.timestamps, parts.sampling.grid, options.substeps, self.solver, options.condition
        )
        self.nfe = max(options.nfe)
        if parts.sampling.timestamps:
            self.nfe = _check_nfe(parts.sampling.timestamps - 1 - self.afs, options.nfe)
        check_second_stage(self.timestamps, options.substeps, options.teacher_step)
        self.optimizer = parts.optimizers.constant(None)
        self.looped = with_loop_convs(parts.model)
        self.longest = max(self.timestamps) - 1

    def with_step(self, cond: Cond, value: ArrayLike, examples: int) -> Cond:
        """The conditioning with `step` added, for a network that takes it."""
        if "step" not in self.parts.cond:
            return cond
        return {**(cond or {}), "step": jnp.full(examples, value, jnp.float32)}

    def init(self, key: Array, batch: Batch, frozen: Mapping[str, Params]) -> TrainState:
        given = frozen.get("student", frozen["teacher"] if self.teacher.own else {})
        params = init_from_teacher(self.parts.initial(key, batch), given)
        held = {name: value for name, value in frozen.items() if name != "student"}
        averages = ("ema",) if self.options.average else ()
        return start({"student": params}, {"student": self.optimizer}, averages, held)

    def targets(self, frozen: Mapping[str, Params], x: Array, cond: Cond, rows: Tree, count: ArrayLike) -> Array:
        """The teacher's states at the student's timestamps."""
        options = self.options
        denoise = self.teacher.denoiser(frozen["teacher"])
        if options.guidance != 1.0:
            denoise = denoisers.guided(denoise, options.guidance, self.parts.cond.null(SEMANTIC))
        if options.teacher_step:
            cond = {**(cond or {}), "step": jnp.full(x.shape[0], float(options.teacher_step))}
        return teacher_states(denoise, x, rows, count, self.solver, cond, options.teacher_afs)

    def step(self, state: TrainState, batch: Batch, key: Array) -> tuple[TrainState, Metrics]:
        keys = dict(zip(("choice", "noise", "label", "dropout"), jax.random.split(key, 4), strict=True))
        shape, conditions = data_of(batch).shape, self.parts.cond
        several = len(self.timestamps) > 1
        choice = jax.random.randint(keys["choice"], (), 0, len(self.timestamps)) if several else 0
        walk = jax.tree.map(lambda a: jnp.asarray(a, _narrow(a))[choice], self.schedule._replace(timestamps=()))
        count = walk.steps if several else self.longest
        cond = draw_labels(keys["label"], conditions.of(batch), conditions, shape[0])
        x = walk.start * along_batch(jax.random.normal(keys["noise"], shape, jnp.float32))
        index = jnp.arange(self.longest)
        steps = {"index": index, "last": index == count - 1, "row": walk.student, "value": walk.value}
        steps["target"] = self.targets(state.frozen, x, cond, walk.teacher, count)
        if self.afs:
            first = jax.tree.map(lambda a: a[0], walk.student)
            x, _ = EULER.step(analytic_first_step, analytic_first_step, None, x, (), first, None)
            steps = jax.tree.map(lambda a: a[1:], steps)
        carry = (state.params["student"], state.opt_state["student"], x)
        factor = self.parts.optimizers.factor(state.step)
        gap = self.gap(state.frozen, keys["dropout"])
        (params, opt_state, _), seen = walk_student(
            gap, self.optimizer, carry, steps, count, cond, factor, self.parts.accum_steps
        )
        trained = count - int(self.afs)
        evaluations = jnp.asarray(trained, jnp.float32)
        metrics = {name: seen[name].sum() / evaluations for name in ("loss", "grad_norm")}
        metrics |= {"end_distance": seen["distance"][trained - 1], "nfe": evaluations}
        return advance(state, params, opt_state, self.parts.rate(state.step + 1, shape[0])), metrics

    def gap(self, frozen: Mapping[str, Params], dropout: Array) -> Gap:
        """The loss of one Euler step of the student against its target."""

        def gap(params: Params, examples: Examples, step: Examples) -> tuple[Array, tuple[Array, Array]]:
            key = jax.random.fold_in(jax.random.fold_in(dropout, step["index"]), step["part"])
            drop = key if self.options.dropout else None
            denoise = self.parts.denoiser(params, model=self.looped, dropout=drop)
            cond = self.with_step(examples.get("cond"), step["value"], examples["x"].shape[0])
            after, _ = EULER.step(denoise, denoise, cond, examples["x"], (), step["row"], None)
            difference = self.criterion(frozen, after, examples["target"], step["last"]).mean()
            return difference, (after, jnp.abs(after - examples["target"]).mean())

        return gap

    def sample(
        self, params: Params, noise: Array, cond: Cond = None, key: Array | None = None, nfe: int | None = None
    ) -> Array:
        afs, guidance = self.afs, self.parts.sampling.guidance
        n = _check_nfe(nfe or self.nfe, self.options.nfe) + 1 + afs
        grid = self.grids[n]
        values = jnp.asarray(self.schedule.value[self.timestamps.index(n)], jnp.float32)
        inner = self.parts.denoiser(params)

        def denoise(x: Array, sigma: Sigma, cond: Cond = None) -> Array:
            above = jnp.asarray(np.log(grid) - 1e-3, x.dtype)
            passed = jnp.sum(jnp.log(jnp.max(sigma)) < above)  # timestamps before this one
            return inner(x, sigma, self.with_step(cond, values[passed], x.shape[0]))

        guide: Denoiser = denoise
        null = self.parts.cond.null(SEMANTIC)
        if guidance != 1.0 and null:
            guide = denoisers.guided(denoise, guidance, null)
        return solvers.solve(guide, grid[0] * noise, grid, EULER, cond, afs=afs)


def _check_nfe(nfe: int, known: Sequence[int]) -> int:
    if nfe not in known:
        raise ValueError(f"this student is trained for {', '.join(map(str, known))} evaluations, got {nfe}")
    return nfe


def check_second_stage(timestamps: Sequence[int], substeps: int, teacher_step: int) -> None:
    """A teacher conditioned on its number of timestamps must be run with that many."""
    for n in timestamps:
        if teacher_step and substeps * (n - 1) + 1 != teacher_step:
            raise ValueError(
                f"the teacher is conditioned on {teacher_step} timestamps (teacher_step), but with {substeps} "
                f"sub-steps for each of {n - 1} student steps it takes {substeps * (n - 1) + 1}; change substeps or "
                "teacher_step"
            )


def teacher_model(model: nn.Module, teacher_step: int) -> nn.Module:
    """The student's architecture, with step conditioning only if the teacher has it too, and without other scalars."""
    if getattr(model, "scalars", ()):
        model = model.clone(scalars=())
    conditioned = bool(getattr(model, "step_embed", ""))
    if teacher_step and not conditioned:
        raise ValueError(
            f"teacher_step={teacher_step} conditions the teacher on its steps, but the model has no step_embed; set it"
        )
    if conditioned and not teacher_step:
        return model.clone(step_embed="")
    return model


def _narrow(array: np.ndarray) -> Dtype:
    return jnp.int32 if array.dtype.kind == "i" else jnp.float32
