"""One evaluation on the digits: distilled from the teacher directly, or from its SFD-v student (two stages).

    python -m experiments.sfd.second_stage --teacher=runs/digits --out=runs/experiments [--lpips=lpips_alex.npz]

Direct students come twice: with the iterations of the second stage, and with those of both stages. LPIPS weights add
the rows with L1 + LPIPS, images enlarged to 32 x 32 for it.
"""

from __future__ import annotations

from statistics import mean
from typing import Any

import jax

from experiments.common.distillation import DigitsStudy, parse, parser
from experiments.common.results import plt
from experiments.common.tables import cell, show, spread
from experiments.sfd.recipes import SECOND, SINGLE


def main() -> None:
    p = parser(__doc__, iterations=150, seeds=1)
    p.add_argument("--first", type=int, default=110, help="iterations of the first stage")
    p.add_argument("--lpips", default="", help="AlexNet weights of LPIPS")
    args = parse(p)
    args.first = min(args.first, 2) if args.tiny else args.first
    study = DigitsStudy(args)
    first = study.sfd((2, 3, 4, 5), {}, args.first)
    stage_one = {seed: first.train(seed) for seed in study.seeds}
    teachers = {seed: jax.device_get(params) for seed, (params, _) in stage_one.items()}
    rows = []
    for loss in ("l1", "l1+lpips") if args.lpips else ("l1",):
        changes = {"sfd.loss": loss}
        for iterations in (args.iterations, args.iterations + args.first):
            rows.append(distil(study, "direct", {**SINGLE, **changes}, iterations, {}, 0.0))
        spent = mean(seconds for _, seconds in stage_one.values())
        rows.append(distil(study, "two-stage", {**SECOND, **changes}, args.iterations, teachers, spent))
    report(study, rows)
    record = {"rows": rows, "changes": {"direct": SINGLE, "two-stage": SECOND}}
    study.save("second_stage", record, draw(rows))


def distil(study: DigitsStudy, way: str, changes: Any, iterations: int, teachers: Any, spent: float) -> dict[str, Any]:
    """One row: distances over seeds, and the seconds of fine-tuning, those already spent included."""
    distillation = study.sfd((1,), changes, iterations)
    students = {seed: distillation.train(seed, teachers.get(seed)) for seed in study.seeds}
    scores = [distillation.measure(params, seed, nfe=1) for seed, (params, _) in students.items()]
    total = iterations + (study.args.first if way == "two-stage" else 0)
    return {
        "way": way,
        "loss": changes["sfd.loss"],
        "iterations": iterations,
        "in all": total,
        "seconds": spent + mean(seconds for _, seconds in students.values()),
        **{name: [score[name] for score in scores] for name in ("frechet", "recall", "coverage")},
    }


def report(study: DigitsStudy, rows: list[dict[str, Any]]) -> None:
    columns = ("way", "loss", "iterations", "in all", "seconds", "frechet", "recall", "coverage")
    text = [
        [cell(r[c]) if isinstance(r[c], list) else f"{r[c]:.0f}" if c == "seconds" else r[c] for c in columns]
        for r in rows
    ]
    show(f"1 evaluation, {study.args.seeds} seed(s), {study.args.samples} images", columns, text)
    print("the paper: compares L1 and L1+LPIPS, direct and two-stage; two-stage with L1+LPIPS is what it proposes")
    for loss in dict.fromkeys(row["loss"] for row in rows):
        short, long, two = (mean(row["frechet"]) for row in rows if row["loss"] == loss)
        print(
            f"here with {loss}: two-stage {two:.3f}, direct {short:.3f} at equal iterations to 1 evaluation, "
            f"{long:.3f} at equal iterations in all"
        )


def draw(rows: list[dict[str, Any]]) -> Any:
    figure, axis = plt.subplots(figsize=(6, 3.5))
    names = [f"{row['way']}, {row['loss']}\n{row['in all']} iterations" for row in rows]
    axis.barh(names, [mean(row["frechet"]) for row in rows], xerr=[spread(row["frechet"]) for row in rows])
    axis.invert_yaxis()
    axis.set(xlabel="Fréchet distance, 1 evaluation")
    return figure


if __name__ == "__main__":
    main()
