"""Quality by training steps on the digits, with and without assigned noise: one config, one field changed.

    python -m experiments.immiscible.compare --study=ct [--steps=1000] [--seeds=3] [--out=runs/experiments]

--study=ct       consistency training, one-step samples (Table 3, Figure 5)
--study=ddim     a DDPM sampled with 20 DDIM steps; at the end also with 50, 10 and 5 (Figure 5, Table 4)
--study=kinds    the same with L2, L1, half precision, KNN, and pairs that are as sharp but not near (Table 5, Figure 7)
--study=batches  the same at batch 32, 64 and 128, assigned and not (Figure 8)

All variants of a seed see the same images, levels and initial parameters, in the same order. The threshold of "steps to
quality" is the last distance of the baseline with the same seed. Training losses are not compared: assigned noise is
easier to see.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from experiments.common import results
from experiments.common.loops import marks_of
from experiments.common.results import plt
from experiments.common.tables import cell, show
from jaxdiff import training
from jaxdiff.configs import digits_immiscible

KINDS = ("none", "hungarian", "hungarian_l2", "hungarian_l1", "half precision", "knn", "rotated", "farthest")
STUDIES: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "ct": ("ct", {kind: {"noise.assignment": kind} for kind in KINDS[:2]}),
    "ddim": ("ddim", {kind: {"noise.assignment": kind} for kind in KINDS[:2]}),
    "kinds": ("ddim", {kind: {"noise.assignment": kind} for kind in KINDS}),
    "batches": (
        "ddim",
        {
            f"{kind}, batch {size}": {"noise.assignment": kind, "data.batch_size": size}
            for size in (32, 64, 128)
            for kind in KINDS[:2]
        },
    ),
}
STUDIES["kinds"][1]["half precision"] = {
    "noise.assignment": "hungarian_l2",
    "noise.assignment_options": {"half": True},
}
CLAIMS = {
    "ct": "CIFAR-10, FID: the baseline's final 10.23 (800k steps) after 180k steps with assignment, 8.59 at the end",
    "ddim": "CIFAR-10: up to 3x fewer steps; the gain grows as inference steps shrink",
    "kinds": "L1 and L2 alike; a pairing that is not optimal transport keeps most of the gain",
    "batches": "gains at batch 128, 256 and 512",
}


class Training(NamedTuple):
    """One seed: distances at the marks and by inference steps, and how much nearer assigned noise is."""

    distances: list[float]
    by_steps: dict[int, float]
    reduction: float


def train(config: ConfigDict, seed: int, inference: Sequence[int]) -> Training:
    """Train with a seed, evaluated at the marks, and sample the end with other numbers of inference steps."""
    with config.unlocked():
        config.seed, config.eval.seed = seed, 1000 + seed
    with tempfile.TemporaryDirectory() as workdir:
        training.train(config, workdir, quiet=True)
        distances = [row["frechet_digits"] for row in lines(Path(workdir) / "evaluations.jsonl")]
        logged = lines(Path(workdir) / "metrics.jsonl")
        reduction = mean(row["distance_reduction"] for row in logged if "loss" in row) if assigned(config) else 0.0
        by_steps = {}
        for steps in inference:
            with config.unlocked():
                config.sample.timestamps = steps
            saved = training.load(workdir, config).with_data()
            record = training.evaluate(saved.run, saved.params, saved.mesh)
            assert record is not None
            by_steps[steps] = record["frechet_digits"]
    return Training(distances, by_steps, reduction)


def assigned(config: ConfigDict) -> bool:
    """Whether noise is assigned to images."""
    return config.noise.assignment != "none"


def lines(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def config_of(arg: str, changes: dict[str, Any], args: argparse.Namespace) -> ConfigDict:
    """configs/digits_immiscible.py for so few steps, with changes."""
    config = digits_immiscible.get_config(arg)
    with config.unlocked():
        config.update_from_flattened_dict(changes)
        config.train.steps = config.train.save_every = args.steps
        config.train.log_every = config.train.eval_every = args.steps // args.marks
        config.optim.decay_images = args.steps * config.data.batch_size
        config.optim.warmup_images = config.data.batch_size * args.steps // 20
        config.eval.samples, config.sample.count = args.samples, 0
        if args.tiny:
            config.model.fields.width = 8
    return config


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--study", choices=STUDIES, required=True)
    p.add_argument("--steps", type=int, default=1000, help="of each training, a multiple of --marks")
    p.add_argument("--marks", type=int, default=10, help="how often a training is evaluated, evenly spaced")
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--samples", type=int, default=2000, help="images per distance")
    p.add_argument("--out", default="runs/experiments", help="folder for the JSON and PNG files")
    p.add_argument("--tiny", action="store_true", help="a few steps of a small network, to try the script")
    args = p.parse_args()
    if args.tiny:
        args.steps, args.marks, args.samples, args.seeds = 4, 2, 64, 1
    if args.steps % args.marks:
        p.error(f"--steps={args.steps} is not a multiple of --marks={args.marks}")
    arg, variants = STUDIES[args.study]
    inference = (5, 10, 20, 50) if args.study == "ddim" else ()
    found: dict[str, list[Training]] = {}
    for name, changes in variants.items():
        found[name] = []
        for seed in range(args.seeds):
            found[name].append(train(config_of(arg, changes, args), seed, inference))
            print(f"{name}, seed {seed}: {found[name][-1].distances[-1]:.3f} after {args.steps} steps", flush=True)
    report(args, found, inference)


def report(args: Any, found: dict[str, list[Training]], inference: Sequence[int]) -> None:
    """Tables, the figure and the JSON file."""
    marks = marks_of(args.steps, args.marks)
    curves = {name: [one.distances for one in seeds] for name, seeds in found.items()}
    reductions = {name: mean(one.reduction for one in seeds) for name, seeds in found.items()}
    by_steps = {name: {n: [one.by_steps[n] for one in seeds] for n in inference} for name, seeds in found.items()}
    rows = [
        [name, f"{reductions[name]:.1%}", *(cell(values) for values in zip(*curve, strict=True))]
        for name, curve in curves.items()
    ]
    title = f"Fréchet distance in digit features by training steps, {args.seeds} seeds, {args.samples} images"
    show(title, ["assignment", "nearer by", *map(str, marks)], rows)
    first = {
        name: reached(marks, curve, [last[-1] for last in curves[baseline(name)]]) for name, curve in curves.items()
    }
    rows = [[name, *(str(step or "never") for step in steps), speed_up(first, name)] for name, steps in first.items()]
    columns = [f"seed {seed}" for seed in range(args.seeds)]
    show("steps to the last distance of the baseline with the same seed", ["assignment", *columns, "speed-up"], rows)
    if inference:
        rows = [[name, *(cell(values[n]) for n in inference)] for name, values in by_steps.items()]
        show("after training, by inference steps", ["assignment", *map(str, inference)], rows)
    print(f"\nthe paper: {CLAIMS[args.study]}")
    record = {"settings": results.settings(args), "marks": marks, "frechet": curves}
    record |= {"distance_reduction": reductions, "steps_to_baseline": first, "inference": by_steps}
    results.save(args.out, f"immiscible_{args.study}", record, draw(marks, curves))


def draw(marks: list[int], curves: dict[str, list[list[float]]]) -> Any:
    figure, axis = plt.subplots(figsize=(7, 4.5))
    for name, curve in curves.items():
        values = np.asarray(curve)
        axis.errorbar(marks, values.mean(0), values.std(0), marker="o", markersize=3, capsize=2, label=name)
    axis.set(yscale="log", xlabel="training steps", ylabel="Fréchet distance, digit features")
    axis.legend(fontsize=8)
    return figure


def baseline(name: str) -> str:
    """The variant without assignment that `name` is compared with."""
    return ", ".join(["none", *name.split(", ")[1:]])


def reached(marks: list[int], curves: list[list[float]], wanted: list[float]) -> list[int | None]:
    """The first mark of each seed at which the distance was as low as wanted."""
    return [
        next((mark for mark, value in zip(marks, curve, strict=True) if value <= goal), None)
        for curve, goal in zip(curves, wanted, strict=True)
    ]


def speed_up(first: dict[str, list[int | None]], name: str) -> str:
    """How many times fewer steps than the baseline, the mean over seeds, where every seed reached it."""
    pairs = list(zip(first[baseline(name)], first[name], strict=True))
    ratios = [before / after for before, after in pairs if before and after]
    return f"{mean(ratios):.2f}x" if len(ratios) == len(pairs) else "not on every seed"


if __name__ == "__main__":
    main()
