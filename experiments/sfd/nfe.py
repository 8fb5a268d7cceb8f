"""SFD-v on the digits at 1 to 5 evaluations, against training-free solvers at the same number and the teacher at 35.

    python -m experiments.sfd.nfe --teacher=runs/digits_long --out=runs/experiments

One SFD-v student serves 2 to 5 evaluations (configs/digits_sfd.py); 1 is its second stage. Each seed distils anew and
draws new noise; solvers and the teacher see the same noise. A solver enters with its best variant at each number of
evaluations: with or without analytical first step and final x0 step, t_min 0.002 or 0.006, picked on the first
--pick images of seed 0. "clear" is lower on every seed, by more than two standard deviations of the differences.
The teacher should be that of configs/digits.py:long: the short one's own error hides the solvers' at 5 evaluations.
"""

from __future__ import annotations

import itertools
from statistics import mean
from typing import Any

import jax

from experiments.common.distillation import DigitsStudy, parse, parser
from experiments.common.results import plt
from experiments.common.tables import cell, show, show_verdicts, spread
from experiments.sfd.recipes import SECOND
from jaxdiff import solvers

NFE = (1, 2, 3, 4, 5)
NAMES = {
    "euler": "DDIM",
    "heun": "Heun",
    "dpm2": "DPM-2",
    "ipndm": "iPNDM",
    "dpmpp2m": "DPM++(2M)",
    "dpmpp3m": "DPM++(3M)",
    "unipc": "UniPC",
}
Scores = dict[int, list[dict[str, float]]]  # evaluations -> measures, one per seed


def main() -> None:
    p = parser(__doc__, iterations=330, seeds=3)
    p.add_argument("--second", type=int, default=300, help="iterations of the second stage")
    p.add_argument("--pick", type=int, default=500, help="images to pick each solver's variant on")
    args = parse(p)
    if args.tiny:
        args.second, args.pick = 2, 64
    study = DigitsStudy(args)
    before = study.teacher_seconds(2 if args.tiny else 50)
    student, seconds = distil(study)
    seconds["teacher"] = [before, study.teacher_seconds(2 if args.tiny else 50)]
    teacher = [study.measure(study.heun(seed)[0]) for seed in study.seeds]
    free, variants = {}, {}
    for solver in NAMES:
        variants[solver] = {nfe: pick(study, solver, nfe) for nfe in NFE}
        free[solver] = {
            nfe: [
                study.measure(study.solve(solver, *variant, *study.noise(seed, args.samples))) for seed in study.seeds
            ]
            for nfe, variant in variants[solver].items()
        }
    verdicts = report(study, student, free, teacher, seconds)
    results = {"sfd_v": student, "heun_35": teacher, "training_free": free, "seconds": seconds, "verdicts": verdicts}
    results["second_stage_changes"] = SECOND
    results["variants (timestamps, afs, final_denoise, t_min)"] = variants
    study.save("nfe", results, draw(student, free, teacher))


def distil(study: DigitsStudy) -> tuple[Scores, dict[str, list[float]]]:
    """SFD-v and its second stage, for each seed."""
    first, second = study.sfd(NFE[1:], {}), study.sfd(NFE[:1], SECOND, study.args.second)
    scores: Scores = {nfe: [] for nfe in NFE}
    seconds: dict[str, list[float]] = {"sfd_v": [], "second_stage": []}
    for seed in study.seeds:
        several, spent = first.train(seed)
        one, more = second.train(seed, teacher=jax.device_get(several))
        seconds["sfd_v"].append(spent)
        seconds["second_stage"].append(more)
        for nfe in NFE:
            images = first.sample(several, nfe, seed) if nfe > 1 else second.sample(one, 1, seed)
            scores[nfe].append(study.measure(images))
        print(f"seed {seed}: SFD-v {spent:.0f} s, second stage {more:.0f} s", flush=True)
    return scores, seconds


def pick(study: DigitsStudy, solver: str, nfe: int) -> tuple[int, bool, bool, float]:
    """The best (timestamps, afs, final_denoise, t_min) that spends that many evaluations."""
    unit, cond = study.noise(0, study.args.pick)
    found = {}
    for afs, final_denoise, t_min in itertools.product((False, True), (False, True), (0.002, 0.006)):
        try:
            n = solvers.make(solver).timestamps(nfe, afs, final_denoise)
        except ValueError:  # not in whole steps
            continue
        variant = (n, afs, final_denoise, t_min)
        found[variant] = study.measure(study.solve(solver, *variant, unit, cond))["frechet"]
    return min(found, key=lambda variant: found[variant])


def frechet(scores: list[dict[str, float]]) -> list[float]:
    return [score["frechet"] for score in scores]


def clear(better: list[float], worse: list[float]) -> bool:
    """Lower on every seed, and by more than two standard deviations of the differences: both saw the same noise."""
    gaps = [b - a for a, b in zip(better, worse, strict=True)]
    return min(gaps) > 0 and mean(gaps) > 2 * spread(gaps)


def report(study: DigitsStudy, student: Scores, free: dict[str, Scores], teacher: Any, seconds: Any) -> dict[str, bool]:
    """Print the tables and the claims, each held or not."""
    count = f"{study.args.seeds} seeds, {study.args.samples} images per distance"
    rows = [["SFD-v (1: second stage)", *(cell(frechet(student[nfe])) for nfe in NFE)]]
    rows += [[NAMES[s], *(cell(frechet(free[s][nfe])) for nfe in NFE)] for s in free]
    show(f"Fréchet distance in digit features by evaluations, {count}", ["sampler", *map(str, NFE)], rows)
    print(f"teacher, Heun at 35: {cell(frechet(teacher))}")
    rows = []
    for solver, scores in free.items():
        pairs = [list(zip(frechet(student[nfe]), frechet(scores[nfe]), strict=True)) for nfe in NFE]
        gaps = [[theirs - ours for ours, theirs in pair] for pair in pairs]
        words = [" clear" * clear(frechet(student[nfe]), frechet(scores[nfe])) for nfe in NFE]
        cells = [f"{mean(gap):+.3f} ± {spread(gap):.3f}{word}" for gap, word in zip(gaps, words, strict=True)]
        rows.append([NAMES[solver], *cells])
    show("solver's distance minus SFD-v's, on the same noise seed by seed", ["solver", *map(str, NFE)], rows)

    measures = ("frechet", "precision", "recall", "density", "coverage")
    compared = {"Heun, 35": teacher, **{f"SFD-v, {nfe}": student[nfe] for nfe in NFE}}
    compared |= {f"{NAMES[s]}, 5": free[s][5] for s in free}
    rows = [[name, *(cell([one[m] for one in scores]) for m in measures)] for name, scores in compared.items()]
    show("fidelity and diversity (5 neighbours)", ["sampler, evaluations", *measures], rows)

    ratios = {nfe: mean(frechet(student[nfe])) / mean(frechet(teacher)) for nfe in NFE}
    spent, whole = mean(seconds["sfd_v"]), mean(seconds["teacher"])
    print("\nSFD-v over the teacher at 35: " + ", ".join(f"{r:.2f}x at {nfe}" for nfe, r in ratios.items()))
    print(
        f"fine-tuning SFD-v {spent:.0f} s, its second stage {mean(seconds['second_stage']):.0f} s more; the teacher's "
        f"training {whole:.0f} s, from 50 of its steps before and 50 after; compilation left out of all"
    )
    wins = all(clear(frechet(student[n]), frechet(scores[n])) for scores in free.values() for n in NFE[1:])
    verdicts = {
        "SFD-v beats every training-free solver clearly at 2, 3, 4, 5": wins,
        "SFD-v at 4 and 5 is within 1.3x of the teacher at 35": max(ratios[4], ratios[5]) < 1.3,
        "fine-tuning takes less than half of the teacher's training": spent < whole / 2,
    }
    print(
        "\nthe paper, CIFAR-10 (FID, other data and network): SFD-v 4.28 / 3.50 / 3.18 / 2.95 at 2 / 3 / 4 / 5 after "
        "4.26 A100-hours, second stage 5.83 at 1; DPM++(3M) 24.97 and DDIM 49.66 at 5; comparable diversity"
    )
    show_verdicts(verdicts)
    return verdicts


def draw(student: Scores, free: dict[str, Scores], teacher: Any) -> Any:
    figure, axis = plt.subplots(figsize=(7, 4.5))
    for solver, scores in free.items():
        axis.plot(NFE, [mean(frechet(scores[nfe])) for nfe in NFE], marker="o", markersize=3, label=NAMES[solver])
    values = [frechet(student[nfe]) for nfe in NFE]
    axis.errorbar(NFE, list(map(mean, values)), list(map(spread, values)), color="k", marker="s", lw=2, label="SFD-v")
    axis.axhline(mean(frechet(teacher)), color="k", linestyle=":", label="teacher, Heun at 35")
    axis.set(yscale="log", xlabel="evaluations", ylabel="Fréchet distance, digit features", xticks=NFE)
    axis.legend(fontsize=8)
    return figure


if __name__ == "__main__":
    main()
