"""Few-step schedules as padded arrays: one program for every number of steps.

A student has n timestamps; its teacher takes K sub-steps between consecutive ones, on a grid that contains them. The
schedules for all n are padded to the longest, so that one can be selected inside a program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jaxdiff import solvers
from jaxdiff.conditions import Cond
from jaxdiff.denoisers import Denoiser, Sigma
from jaxdiff.solvers import Solver, analytic_first_step
from jaxdiff.trees import Tree

EULER = solvers.euler()
Grid = Callable[[int], np.ndarray]  # number of timestamps -> timestamps, descending


class StepSchedule(NamedTuple):
    """The schedules of all n, padded to the longest; each array has a leading axis of len(timestamps)."""

    timestamps: tuple[int, ...]
    student: Tree  # Euler's table [choice, step]
    teacher: Tree  # the teacher solver's table [choice, step, sub-step]
    value: np.ndarray  # cond["step"] [choice, step]
    steps: np.ndarray  # number of steps [choice]
    start: np.ndarray  # t_0 [choice]


def make_schedule(
    timestamps: Sequence[int], grid: Grid, substeps: int, solver: Solver, condition: str = "steps"
) -> tuple[StepSchedule, dict[int, np.ndarray]]:
    """The schedule, and the student grid of each n: every `substeps`-th point of the teacher's, bit-exact."""
    longest = max(timestamps) - 1
    grids: dict[int, np.ndarray] = {}
    rows = []
    for n in timestamps:
        fine = np.asarray(grid(substeps * (n - 1) + 1), np.float64)
        grids[n], wanted = fine[::substeps], np.asarray(grid(n), np.float64)
        if not np.allclose(grids[n], wanted, rtol=1e-6):
            raise ValueError(
                f"the teacher's grid of {len(fine)} timestamps does not contain the student's {wanted}: "
                "choose a grid kind whose finer grids nest, such as polynomial or logsnr"
            )
        nested = jax.tree.map(lambda a, n=n: a.reshape(n - 1, substeps, *a.shape[1:]), solver.table(fine, np))
        value = np.full(n - 1, float(n)) if condition == "steps" else np.log(grids[n][1:]) / 4
        row = (EULER.table(grids[n], np), nested, value)
        rows.append(jax.tree.map(lambda a, n=n: np.concatenate([a, a[-1:].repeat(longest - (n - 1), 0)]), row))
    student, teacher, value = jax.tree.map(lambda *leaves: np.stack(leaves), *rows)
    count = np.array([n - 1 for n in timestamps], np.int32)
    return StepSchedule(
        tuple(timestamps), student, teacher, value, count, np.array([grids[n][0] for n in timestamps])
    ), grids


def teacher_states(
    denoise: Denoiser, x: Array, rows: Tree, count: ArrayLike, solver: Solver, cond: Cond = None, afs: bool = False
) -> Array:
    """The states [steps, b, ...] after each student step; those past `count` repeat the last at no cost."""
    steps, substeps = jax.tree.leaves(rows)[0].shape[:2]
    rows = jax.tree.map(lambda a: jnp.asarray(a, x.dtype), rows)
    index = jnp.arange(steps * substeps).reshape(steps, substeps)

    def substep(carry: Tree, inputs: Tree) -> tuple[Tree, None]:
        i, row = inputs

        def first(x: Array, sigma: Sigma, cond: Cond) -> Array:
            if not afs:
                return denoise(x, sigma, cond)
            return jax.lax.cond(i == 0, analytic_first_step, denoise, x, sigma, cond)

        return solver.step(first, denoise, cond, *carry, row, None), None

    def interval(carry: Tree, inputs: Tree) -> tuple[Tree, Array]:
        carry, _ = jax.lax.scan(substep, carry, inputs)
        return carry, carry[0]

    def maybe(carry: Tree, inputs: Tree) -> tuple[Tree, Array]:
        if isinstance(count, (int, np.integer)) and count >= steps:
            return interval(carry, inputs)
        return jax.lax.cond(inputs[0][0] < count * substeps, interval, lambda c, _: (c, c[0]), carry, inputs)

    return jax.lax.scan(maybe, (x, (jnp.zeros_like(x),) * solver.history), (index, rows))[1]


def check_walks(nfe: Sequence[int], afs: bool, substeps: int, solver: Solver) -> tuple[int, ...]:
    """The number of timestamps n for each number of evaluations: n = nfe + 1, one more with AFS."""
    if not nfe or any(int(n) != n or n < 1 for n in nfe) or len(set(nfe)) < len(nfe):
        raise ValueError(f"nfe must list distinct numbers of evaluations, each at least 1, got {tuple(nfe)}")
    if substeps < 1:
        raise ValueError(f"substeps (K), the teacher's steps per student step, must be at least 1, got {substeps}")
    if solver.stochastic:
        raise ValueError("the teacher's solver must be deterministic, because the student imitates its trajectory")
    return tuple(int(n) + 1 + afs for n in nfe)
