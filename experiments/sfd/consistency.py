"""What fine-tuning costs: SFD-v and its second stage next to consistency distillation of the same teacher.

    python -m experiments.sfd.consistency --teacher=runs/digits --out=runs/experiments

Consistency distillation (configs/digits_immiscible.py:cd, improved recipe) is measured --marks times on its way, at 1
and 2 evaluations; seconds are those of training alone, compilation and evaluation left out, all in one run.
"""

from __future__ import annotations

from typing import Any

import jax

from experiments.common.distillation import DigitsStudy, parse, parser
from experiments.common.loops import Loop, marks_of
from experiments.common.results import plt
from experiments.common.tables import cell, show
from experiments.sfd.recipes import SECOND
from jaxdiff import solvers, training
from jaxdiff.configs import digits_immiscible
from jaxdiff.methods import exported
from jaxdiff.training.components import grid_of

Points = list[tuple[float, dict[int, float]]]  # (seconds, {evaluations: distance})


def main() -> None:
    p = parser(__doc__, iterations=110, seeds=1)
    p.add_argument("--second", type=int, default=300, help="iterations of the second stage")
    p.add_argument("--consistency", type=int, default=1500, help="iterations of consistency distillation")
    p.add_argument("--marks", type=int, default=5)
    args = parse(p)
    if args.tiny:
        args.second, args.consistency, args.marks = 2, 2, 2
    study = DigitsStudy(args)
    sfd, cd = [], []
    for seed in study.seeds:
        sfd.append(distil(study, seed))
        cd.append(consistency(study, seed))
    report(study, sfd, cd)


def distil(study: DigitsStudy, seed: int) -> Points:
    """SFD-v at 2 evaluations, and with the second stage at 1."""
    first, second = study.sfd((2, 3, 4, 5), {}), study.sfd((1,), SECOND, study.args.second)
    several, spent = first.train(seed)
    one, more = second.train(seed, teacher=jax.device_get(several))
    at_two = first.measure(several, seed, nfe=2)["frechet"]
    at_one = second.measure(one, seed, nfe=1)["frechet"]
    return [(spent, {2: at_two}), (spent + more, {1: at_one})]


def consistency(study: DigitsStudy, seed: int) -> Points:
    """Consistency distillation at its marks."""
    config = digits_immiscible.get_config("cd")
    count = study.args.consistency
    with config.unlocked():
        config.seed = seed
        config.teacher = study.base.teacher
        config.model.fields = study.base.model.fields
        config.model.fields.step_embed = ""
        config.data.batch_size = study.base.data.batch_size
        config.train.steps, config.optim.decay_images = count, count * config.data.batch_size
    data = training.load_data(config)
    run = training.build(config, data)
    loop = Loop(run)
    points: Points = []
    seconds = 0.0

    def measure(params: Any, nfe: int) -> float:
        return study.measure(sample(study, run, params, nfe, seed))["frechet"]

    state, done = loop.init(seed, {"teacher": study.teacher}), 0
    for mark in marks_of(count, study.args.marks):
        batches = (run.select(data.batch(step, config.data.batch_size)) for step in range(done, mark))
        keys = [jax.random.fold_in(jax.random.key(seed), step) for step in range(done, mark)]
        state, spent = loop.train(state, batches, keys)
        seconds, done = seconds + spent, mark
        points.append((seconds, {nfe: measure(exported(state), nfe) for nfe in (1, 2)}))
    return points


def sample(study: DigitsStudy, run: training.Run, params: Any, nfe: int, seed: int) -> Any:
    """Images of a consistency model at `nfe` evaluations."""
    unit, cond = study.noise(seed, study.args.samples)
    sigmas = grid_of(run.config, run.convention)(nfe)
    renoise = solvers.make("renoise", floor=run.config.consistency.sigma_min)
    denoise = jax.jit(run.method.denoiser(params))
    keys = jax.random.split(jax.random.key(seed), len(unit))
    return solvers.solve(denoise, sigmas[0] * unit, sigmas, renoise, cond, key=keys, final_denoise=True)


def report(study: DigitsStudy, sfd: list[Points], cd: list[Points]) -> None:
    rows = []
    for i, (name, nfe) in enumerate({"SFD-v": 2, "SFD-v and second stage": 1}.items()):
        rows.append([name, str(nfe), f"{mean_of(sfd, i):.0f}", cell([points[i][1][nfe] for points in sfd])])
    for nfe in (2, 1):
        for i in range(len(cd[0])):
            distances = [points[i][1][nfe] for points in cd]
            rows.append(["consistency distillation", str(nfe), f"{mean_of(cd, i):.0f}", cell(distances)])
    columns = ["", "evaluations", "seconds", "Fréchet distance"]
    show(f"{study.args.seeds} seeds, {study.args.samples} images per distance", columns, rows)
    print("\nthe paper, CIFAR-10: SFD-v 4.28 at 2 after 4.26 A100-hours; consistency distillation 2.93 after 1,156")
    figure, axis = plt.subplots(figsize=(6, 4))
    for nfe in (1, 2):
        axis.plot(*zip(*[(s, d[nfe]) for s, d in cd[0]], strict=True), marker="o", label=f"consistency, {nfe}")
    for (seconds, found), name in zip(sfd[0], ("SFD-v, 2", "second stage, 1"), strict=True):
        axis.plot([seconds], list(found.values()), marker="s", linestyle="", label=name)
    axis.set(yscale="log", xlabel="seconds of training", ylabel="Fréchet distance, digit features")
    axis.legend(fontsize=8)
    study.save("consistency", {"sfd": sfd, "consistency": cd}, figure)


def mean_of(runs: list[Points], i: int) -> float:
    """Seconds at the i-th point, the mean over seeds."""
    return sum(points[i][0] for points in runs) / len(runs)


if __name__ == "__main__":
    main()
