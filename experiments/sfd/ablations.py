"""SFD at 2 evaluations on the digits, one choice of the paper changed at a time.

    python -m experiments.sfd.ablations --teacher=runs/digits --out=runs/experiments [--axis=solver]
    python -m experiments.sfd.ablations --axis=loss --lpips=lpips_alex.npz

Axes: the teacher's solver, t_min, AFS at equal evaluations, the loss, K (the teacher's steps per student step), rho.
The unchanged row is the paper's choice: DPM++(3M), t_min 0.006, AFS, L1, K = 4, rho 7.
"""

from __future__ import annotations

import json
from statistics import mean
from typing import Any

from experiments.common.distillation import DigitsStudy, parse, parser
from experiments.common.results import plt
from experiments.common.tables import cell, show, spread
from experiments.sfd.recipes import SINGLE

SOLVERS = ("euler", "heun", "dpm2", "ipndm", "dpmpp2m", "dpmpp3m")
LOSSES = ("l1", "l2", "pseudo_huber")
# name -> the field, its values, the paper's choice, what the paper says
AXES: dict[str, tuple[str, tuple, Any, str]] = {
    "solver": ("sfd.solver", SOLVERS, "dpmpp3m", "DPM++(3M) chosen"),
    "t_min": ("sample.sigma_min", (0.002, 0.006, 0.02, 0.05), 0.006, "0.006 chosen over the sampling default 0.002"),
    "afs": ("sample.afs", (True, False), True, "AFS chosen"),
    "loss": ("sfd.loss", LOSSES, "l1", "L1 chosen"),
    "K": ("sfd.substeps", (1, 2, 3, 4, 5, 6), 4, "4 chosen"),
    "rho": ("sample.rho", (3.0, 5.0, 7.0, 9.0), 7.0, "7 best"),
}
NFE = 2


def main() -> None:
    p = parser(__doc__, iterations=60, seeds=1)
    p.add_argument("--axis", choices=AXES, action="append", help="one axis; again for another (default: all)")
    p.add_argument("--lpips", default="", help="AlexNet weights of LPIPS, for two more losses")
    args = parse(p)
    study = DigitsStudy(args)
    results: dict[str, dict[str, list[float]]] = {}
    done: dict[str, list[float]] = {}  # the unchanged row is distilled once
    for name in args.axis or AXES:
        field, values, chosen, claim = AXES[name]
        if name == "loss" and args.lpips:
            values = (*values, "lpips", "l1+lpips")
        for value in values:
            changes = {**SINGLE, field: value}
            key = json.dumps(changes if value != chosen else SINGLE)
            if key not in done:
                done[key] = study.sfd((NFE,), changes).frechets()[NFE]
            results.setdefault(name, {})[str(value)] = done[key]
        report(study, name, results[name], str(chosen), claim)
    stem = "_".join(["ablations", *(args.axis or ())])
    study.save(stem, {"changes": SINGLE, "frechet": results}, draw(results))


def report(study: DigitsStudy, name: str, found: dict[str, list[float]], chosen: str, claim: str) -> None:
    best = min(found, key=lambda value: mean(found[value]))
    rows = [
        [value, cell(scores), "the paper's" * (value == chosen), "lowest" * (value == best)]
        for value, scores in found.items()
    ]
    count = f"{study.args.seeds} seed(s), {study.args.iterations} iterations, {study.args.samples} images"
    show(f"{name}, {NFE} evaluations, {count}", [name, "Fréchet", "", ""], rows)
    unsettled = "; one seed has no spread, so small differences are not settled" * (study.args.seeds == 1)
    print(f"the paper (CIFAR-10): {claim}. Here {best} is lowest{unsettled}", flush=True)


def draw(results: dict[str, dict[str, list[float]]]) -> Any:
    figure, axes = plt.subplots(1, len(results), figsize=(3.2 * len(results), 3.4), sharey=True, squeeze=False)
    for axis, (name, found) in zip(axes[0], results.items(), strict=True):
        heights, errors = [mean(v) for v in found.values()], [spread(v) for v in found.values()]
        colours = ["tab:orange" if value == str(AXES[name][2]) else "tab:blue" for value in found]
        axis.bar(list(found), heights, yerr=errors, color=colours)
        axis.tick_params(axis="x", rotation=60)
        axis.set(title=name)
    axes[0][0].set(ylabel=f"Fréchet distance, {NFE} evaluations")
    figure.suptitle("orange: the paper's choice", fontsize=9)
    return figure


if __name__ == "__main__":
    main()
