"""SFD-v on the digits at 1 to 5 evaluations, against training-free solvers at the same number and the teacher at 35.

    python experiments/sfd/nfe.py --teacher=runs/digits_long --out=runs/experiments

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
from lab import Lab, cell, parse, parser, plt, save, show, spread
from variants import SECOND

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
Scores = dict[int, list[dict[str, float]]]  # evaluations -> measures, one a seed


def main() -> None:
    p = parser(__doc__, iterations=330, seeds=3)
    p.add_argument("--second", type=int, default=300, help="iterations of the second stage")
    p.add_argument("--pick", type=int, default=500, help="images to pick each solver's variant on")
    args = parse(p)
    if args.tiny:
        args.second, args.pick = 2, 64
    lab = Lab(args)
    before = lab.teacher_seconds(2 if args.tiny else 50)
    student, seconds = distil(lab)
    seconds["teacher"] = [before, lab.teacher_seconds(2 if args.tiny else 50)]
    teacher = [lab.measure(lab.solve("heun", 18, False, True, 0.002, *lab.noise(s, args.samples))) for s in lab.seeds]
    free, variants = {}, {}
    for solver in NAMES:
        variants[solver] = {nfe: pick(lab, solver, nfe) for nfe in NFE}
        free[solver] = {
            nfe: [lab.measure(lab.solve(solver, *variant, *lab.noise(s, args.samples))) for s in lab.seeds]
            for nfe, variant in variants[solver].items()
        }
    verdicts = report(lab, student, free, teacher, seconds)
    results = {"sfd_v": student, "heun_35": teacher, "training_free": free, "seconds": seconds, "verdicts": verdicts}
    results["second_stage_changes"] = SECOND
    save(lab, "nfe", {**results, "variants (timestamps, afs, to_zero, t_min)": variants}, draw(student, free, teacher))


def distil(lab: Lab) -> tuple[Scores, dict[str, list[float]]]:
    """SFD-v and its second stage, for each seed."""
    first, second = lab.recipe(NFE[1:], {}), lab.recipe(NFE[:1], SECOND, lab.args.second)
    scores: Scores = {nfe: [] for nfe in NFE}
    seconds: dict[str, list[float]] = {"sfd_v": [], "second_stage": []}
    for seed in lab.seeds:
        state, spent = first.train(seed)
        one, more = second.train(seed, teacher=jax.device_get(state.ema))
        seconds["sfd_v"].append(spent)
        seconds["second_stage"].append(more)
        for nfe in NFE:
            images = first.sample(state, nfe, seed) if nfe > 1 else second.sample(one, 1, seed)
            scores[nfe].append(lab.measure(images))
        print(f"seed {seed}: SFD-v {spent:.0f} s, second stage {more:.0f} s", flush=True)
    return scores, seconds


def pick(lab: Lab, solver: str, nfe: int) -> tuple[int, bool, bool, float]:
    """The best (timestamps, afs, to_zero, t_min) that spends that many evaluations."""
    unit, cond = lab.noise(0, lab.args.pick)
    found = {}
    for afs, to_zero, t_min in itertools.product((False, True), (False, True), (0.002, 0.006)):
        try:
            n = solvers.make(solver).timestamps(nfe, afs, to_zero)
        except ValueError:  # not in whole steps
            continue
        variant = (n, afs, to_zero, t_min)
        found[variant] = lab.measure(lab.solve(solver, *variant, unit, cond))["frechet"]
    return min(found, key=lambda variant: found[variant])


def frechet(scores: list[dict[str, float]]) -> list[float]:
    return [score["frechet"] for score in scores]


def clear(better: list[float], worse: list[float]) -> bool:
    """Lower on every seed, and by more than two standard deviations of the differences: both saw the same noise."""
    gaps = [b - a for a, b in zip(better, worse, strict=True)]
    return min(gaps) > 0 and mean(gaps) > 2 * spread(gaps)


def report(lab: Lab, student: Scores, free: dict[str, Scores], teacher: Any, seconds: Any) -> dict[str, bool]:
    """Prints the tables; the claims, each held or not."""
    count = f"{lab.args.seeds} seeds, {lab.args.samples} images a distance"
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
    for claim, held in verdicts.items():
        print(f"{'held' if held else 'NOT HELD'}: {claim}")
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
