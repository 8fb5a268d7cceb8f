"""What fine-tuning costs: SFD-v and its second stage next to consistency distillation of the same teacher.

    python experiments/sfd/consistency.py --teacher=runs/digits --out=runs/experiments

Consistency distillation (configs/digits_immiscible.py:cd, improved recipe) is looked at --marks times on its way, at 1
and 2 evaluations; seconds are those of training alone, compilation and evaluation left out, all in one run.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
from lab import Lab, cell, parse, parser, plt, save, show
from variants import SECOND

from jaxdiff import solvers, training
from jaxdiff.configs import digits_immiscible
from jaxdiff.training.build import build_grid

Points = list[tuple[float, dict[int, float]]]  # (seconds, {evaluations: distance})


def main() -> None:
    p = parser(__doc__, iterations=110, seeds=1)
    p.add_argument("--second", type=int, default=300, help="iterations of the second stage")
    p.add_argument("--consistency", type=int, default=1500, help="iterations of consistency distillation")
    p.add_argument("--marks", type=int, default=5)
    args = parse(p)
    if args.tiny:
        args.second, args.consistency, args.marks = 2, 2, 2
    lab = Lab(args)
    sfd, cd = [], []
    for seed in lab.seeds:
        sfd.append(distil(lab, seed))
        cd.append(consistency(lab, seed))
    report(lab, sfd, cd)


def distil(lab: Lab, seed: int) -> Points:
    """SFD-v at 2 evaluations, and with the second stage at 1."""
    first, second = lab.recipe((2, 3, 4, 5), {}), lab.recipe((1,), SECOND, lab.args.second)
    state, spent = first.train(seed)
    one, more = second.train(seed, teacher=jax.device_get(state.ema))
    two = lab.measure(first.sample(state, 2, seed))["frechet"]
    return [(spent, {2: two}), (spent + more, {1: lab.measure(second.sample(one, 1, seed))["frechet"]})]


def consistency(lab: Lab, seed: int) -> Points:
    """Consistency distillation at its marks."""
    config = digits_immiscible.get_config("cd")
    count = lab.args.consistency
    with config.unlocked():
        config.teacher = lab.base.teacher
        config.model.fields = lab.base.model.fields
        config.model.fields.step_embed = ""
        config.train.steps, config.optim.decay_images = count, count * config.data.batch_size
        config.data.batch_size = lab.base.data.batch_size
    job = training.build(config)
    data = jax.tree.map(jnp.asarray, job.dataset.take(0, job.dataset.size))
    key, size = jax.random.key(seed), config.data.batch_size

    def draw(step: int) -> Any:
        index = jax.random.randint(jax.random.fold_in(key, step), (size,), 0, job.dataset.size)
        return {name: values[index] for name, values in data.items()}

    state = jax.jit(job.method.init)(key, draw(0), {"teacher": lab.teacher})
    run = jax.jit(job.method.step, donate_argnums=0).lower(state, draw(0), key).compile()
    points: Points = []
    spent, begun = 0.0, time.monotonic()
    for step in range(1, count + 1):
        state, _ = run(state, draw(step), jax.random.fold_in(key, count + step))
        if step * lab.args.marks % count < lab.args.marks:
            jax.block_until_ready(state)
            spent += time.monotonic() - begun
            found = {nfe: lab.measure(sample(lab, job, state, nfe, seed))["frechet"] for nfe in (1, 2)}
            points.append((spent, found))
            begun = time.monotonic()
    return points


def sample(lab: Lab, job: Any, state: Any, nfe: int, seed: int) -> Any:
    unit, cond = lab.noise(seed, lab.args.samples)
    sigmas, how = build_grid(job.config)(nfe), solvers.make("renoise", floor=job.config.consistency.sigma_min)
    f = jax.jit(job.method.denoiser(state))
    keys = jax.random.split(jax.random.key(seed), len(unit))
    return solvers.solve(f, sigmas[0] * unit, sigmas, how, cond, key=keys, to_zero=True)


def report(lab: Lab, sfd: list[Points], cd: list[Points]) -> None:
    rows = []
    for i, (name, nfe) in enumerate({"SFD-v": 2, "SFD-v and second stage": 1}.items()):
        rows.append([name, str(nfe), f"{mean_of(sfd, i):.0f}", cell([points[i][1][nfe] for points in sfd])])
    for nfe in (2, 1):
        for i in range(len(cd[0])):
            distances = [points[i][1][nfe] for points in cd]
            rows.append(["consistency distillation", str(nfe), f"{mean_of(cd, i):.0f}", cell(distances)])
    columns = ["", "evaluations", "seconds", "Fréchet distance"]
    show(f"{lab.args.seeds} seeds, {lab.args.samples} images a distance", columns, rows)
    print("\nthe paper, CIFAR-10: SFD-v 4.28 at 2 after 4.26 A100-hours; consistency distillation 2.93 after 1,156")
    figure, axis = plt.subplots(figsize=(6, 4))
    for nfe in (1, 2):
        axis.plot(*zip(*[(s, d[nfe]) for s, d in cd[0]], strict=True), marker="o", label=f"consistency, {nfe}")
    for (seconds, found), name in zip(sfd[0], ("SFD-v, 2", "second stage, 1"), strict=True):
        axis.plot([seconds], list(found.values()), marker="s", linestyle="", label=name)
    axis.set(yscale="log", xlabel="seconds of training", ylabel="Fréchet distance, digit features")
    axis.legend(fontsize=8)
    save(lab, "consistency", {"sfd": sfd, "consistency": cd}, figure)


def mean_of(runs: list[Points], i: int) -> float:
    """Seconds at the i-th point, the mean over seeds."""
    return sum(points[i][0] for points in runs) / len(runs)


if __name__ == "__main__":
    main()
