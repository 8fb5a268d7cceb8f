"""SFD-v on the digits: what the student is conditioned on, and how many numbers of evaluations one student serves.

    python -m experiments.sfd.condition --teacher=runs/digits --out=runs/experiments

Conditions: the number of timestamps (the paper's), the next timestamp, none; the first also with the authors' random
initial weights instead of zeros, with which the student does not start as the teacher. Lists: one student for 2
evaluations, for 2 and 3, and so on; iterations are proportional to the list's length, so that each number of
evaluations gets about as many (the paper's budgets do the same).
"""

from __future__ import annotations

from statistics import mean
from typing import Any

from experiments.common.distillation import DigitsStudy, parse, parser
from experiments.common.results import plt
from experiments.common.tables import cell, show, spread
from experiments.sfd.recipes import PAPER

NFE = (2, 3, 4, 5)
EMBED, COND = "model.fields.step_embed", "sfd.condition"
CONDITIONS = {
    "timestamps, zero init": {EMBED: "zero", COND: "steps"},
    "timestamps, reference init": {EMBED: "reference", COND: "steps"},
    "next timestamp, zero init": {EMBED: "zero", COND: "next"},
    "none": {EMBED: ""},
}
LISTS = {"2": (2,), "2,3": (2, 3), "2,3,4": (2, 3, 4), "2,3,4,5": NFE}


def main() -> None:
    p = parser(__doc__, iterations=120, seeds=1)
    args = parse(p)
    study = DigitsStudy(args)
    count = f"{args.seeds} seed(s), {args.samples} images"
    columns = [*(f"NFE {nfe}" for nfe in NFE)]

    conditions = {name: study.sfd(NFE, {**PAPER, **changes}).frechets() for name, changes in CONDITIONS.items()}
    rows = [[name, *(cell(found[nfe]) for nfe in NFE)] for name, found in conditions.items()]
    show(f"condition: Fréchet distance, {count}, {args.iterations} iterations", ["condition", *columns], rows)
    print("the paper: the number of timestamps is the better condition, the next timestamp the worse")
    better = sum(
        mean(conditions["timestamps, zero init"][n]) < mean(conditions["next timestamp, zero init"][n]) for n in NFE
    )
    print(f"here the number of timestamps is better than the next timestamp at {better} of {len(NFE)}", flush=True)

    each = max(1, args.iterations // len(NFE))
    lists = {"2,3,4,5": conditions["timestamps, zero init"]}
    for name, nfe in LISTS.items():
        if name not in lists:
            lists[name] = study.sfd(nfe, PAPER, each * len(nfe)).frechets()
    rows = [[name, *(cell(lists[name][n]) if n in lists[name] else "-" for n in NFE)] for name in LISTS]
    show(f"list: Fréchet distance, {count}, {each} iterations per entry", ["list", *columns], rows)
    print("the paper: SFD-v of 2,3,4,5 is below SFD of one entry at each (CIFAR-10 at 2: 4.28 against 4.53)")
    print(f"here at 2: {cell(lists['2,3,4,5'][2])} against {cell(lists['2'][2])}")
    lists = {name: lists[name] for name in LISTS}
    record = {"changes": PAPER, "conditions": conditions, "lists": lists}
    study.save("condition", record, draw(conditions, lists))


def draw(conditions: dict[str, Any], lists: dict[str, Any]) -> Any:
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axis, table, title in zip(axes, (conditions, lists), ("condition", "list"), strict=True):
        for name, found in table.items():
            heights, errors = [mean(v) for v in found.values()], [spread(v) for v in found.values()]
            axis.errorbar(list(found), heights, errors, marker="o", markersize=4, label=name)
        axis.set(title=title, xlabel="evaluations", xticks=NFE)
        axis.legend(fontsize=8)
    axes[0].set(ylabel="Fréchet distance, digit features")
    return figure


if __name__ == "__main__":
    main()
