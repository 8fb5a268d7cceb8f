"""Students tuned at one timestamp only: what happens to the gap at the others?

    python -m experiments.sfd.single_timestamp --teacher=runs/digits --out=runs/experiments

The teacher's trajectory passes n = 5 timestamps, so there are four students. Student k learns the Euler step from
the teacher's state at t_k to its state at t_{k+1}, nothing else. The gap at t_j is the L2 distance between the
student's Euler step from the teacher's state at t_j and the teacher's state at t_{j+1}. A ratio below 1 away from the
diagonal means that tuning at one timestamp helped another: the observation that SFD starts from.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.common.distillation import DigitsStudy, parse, parser
from experiments.common.results import plt
from experiments.common.tables import show
from jaxdiff import solvers
from jaxdiff.methods.method import update


def main() -> None:
    p = parser(__doc__, iterations=100, seeds=1)
    p.add_argument("--timestamps", type=int, default=5)
    p.add_argument("--substeps", type=int, default=4, help="K, the teacher's steps per student step")
    p.add_argument("--loss", choices=("l1", "l2"), default="l1")
    p.add_argument("--rate", type=float, default=1e-3, help="learning rate; it falls to 0 as a cosine")
    args = parse(p)
    study = DigitsStudy(args)
    fine = solvers.grid(args.substeps * (args.timestamps - 1) + 1, 0.006, 80.0)
    coarse = fine[:: args.substeps]
    start, tune, gaps = programs(study, fine, coarse)
    before = np.mean([gaps(study.teacher, jax.random.key(10_000 + s)) for s in study.seeds], 0)
    after = np.array(
        [np.mean([tuned(study, start(), tune, gaps, k, s) for s in study.seeds], 0) for k in range(len(coarse) - 1)]
    )
    report(study, coarse[:-1], before, after / before)
    results = {"timestamps": coarse.tolist(), "gap_before": before.tolist(), "gap_after": after.tolist()}
    study.save("single_timestamp", results, draw(coarse[:-1], after / before))


def programs(study: DigitsStudy, fine: np.ndarray, coarse: np.ndarray) -> tuple[Any, Any, Any]:
    """start(), a student; tune(student, k, factor, key), one update at timestamp k; gaps(params, key) at each."""
    optimizer = optax.adam(study.args.rate)
    ratio, levels = jnp.asarray(coarse[1:] / coarse[:-1], jnp.float32), jnp.asarray(coarse[:-1], jnp.float32)

    def trajectory(key: jax.Array, count: int) -> tuple[Any, Any]:
        noise, label = jax.random.split(key)
        cond = {"label": jax.random.randint(label, (count,), 0, 10)}
        x = jnp.float32(fine[0]) * jax.random.normal(noise, (count, *study.data.shape))
        keep = range(0, len(fine), study.args.substeps)
        return solvers.solve(study.denoiser(study.teacher), x, fine, "dpmpp3m", cond, trajectory=keep), cond

    def difference(params: Any, states: Any, cond: Any, k: Any) -> jax.Array:
        step = ratio[k] * states[k] + (1 - ratio[k]) * study.denoiser(params)(states[k], levels[k], cond)
        return (step - states[k + 1]).reshape(states.shape[1], -1)

    def loss(params: Any, states: Any, cond: Any, k: Any) -> jax.Array:
        d = difference(params, states, cond, k)
        return (jnp.abs(d) if study.args.loss == "l1" else d**2).sum(1).mean()

    @jax.jit
    def tune(student: Any, k: Any, factor: Any, key: Any) -> Any:
        params, opt_state = student
        states, cond = trajectory(key, study.base.data.batch_size)
        gradients = jax.grad(loss)(params, states, cond, k)
        return update(optimizer, gradients, opt_state, params, factor)

    @jax.jit
    def gaps(params: Any, key: Any) -> jax.Array:
        states, cond = trajectory(key, min(512, study.args.samples))
        gap = lambda k: jnp.linalg.norm(difference(params, states, cond, k), axis=1).mean()  # noqa: E731
        return jax.lax.map(gap, jnp.arange(len(coarse) - 1))

    return lambda: (study.teacher, optimizer.init(study.teacher)), tune, gaps


def tuned(study: DigitsStudy, student: Any, tune: Any, gaps: Any, k: int, seed: int) -> np.ndarray:
    """Gaps of the student tuned at timestamp k."""
    iterations = study.args.iterations
    for i in range(iterations):
        factor = 0.5 * (1 + np.cos(np.pi * i / iterations))
        student = tune(student, k, jnp.float32(factor), jax.random.fold_in(jax.random.key(seed), i))
    return np.asarray(gaps(student[0], jax.random.key(10_000 + seed)))


def report(study: DigitsStudy, levels: np.ndarray, before: np.ndarray, ratios: np.ndarray) -> None:
    count = (
        f"{study.args.seeds} seed(s), {study.args.iterations} iterations, {study.args.loss}, rate {study.args.rate:g}"
    )
    names = [f"t = {level:.3g}" for level in levels]
    rows = [["untuned gap", *(f"{gap:.3f}" for gap in before)]]
    rows += [[f"tuned at {name}", *(f"{r:.2f}x" for r in row)] for name, row in zip(names, ratios, strict=True)]
    show(f"L2 gap of one Euler step from the teacher's state, {count}", ["", *names], rows)
    others = ratios[~np.eye(len(levels), dtype=bool)]
    print("the paper: tuning at one timestamp shrinks the gap at other timestamps too")
    print(f"here it shrank at {(others < 1).sum()} of {others.size} other timestamps, median {np.median(others):.2f}x")


def draw(levels: np.ndarray, ratios: np.ndarray) -> Any:
    figure, axis = plt.subplots(figsize=(5, 4.2))
    names = [f"{level:.3g}" for level in levels]
    image = axis.imshow(np.log2(ratios), cmap="RdBu_r", vmin=-2, vmax=2)
    for (i, j), ratio in np.ndenumerate(ratios):
        axis.text(j, i, f"{ratio:.2f}x", ha="center", va="center", color="w" if abs(np.log2(ratio)) > 1.2 else "k")
    axis.set(xlabel="measured at t", ylabel="tuned at t", title="gap after / before")
    axis.set_xticks(range(len(names)), names)
    axis.set_yticks(range(len(names)), names)
    figure.colorbar(image, label="log2")
    return figure


if __name__ == "__main__":
    main()
