"""Quality by training steps on the digits, with and without assigned noise: one config, one field changed.

    python experiments/immiscible/compare.py --study=ct [--steps=1000] [--seeds=3] [--out=runs/experiments]

--study=ct       consistency training, one-step samples (Table 3, Figure 5)
--study=ddim     a DDPM sampled with 20 DDIM steps; at the end also with 50, 10 and 5 (Figure 5, Table 4)
--study=kinds    the same with L2, L1, half precision, KNN, and pairs that are as sharp but not near (Table 5, Figure 7)
--study=batches  the same at batch 32, 64 and 128, assigned and not (Figure 8)

All variants of a seed see the same images, levels and initial parameters, in the same order. The threshold of "steps to
quality" is the baseline's mean distance at its end. Training losses are not compared: assigned noise is easier to see.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from lab import Judge, cell, plt, show

from jaxdiff import solvers, training
from jaxdiff.configs import digits_immiscible
from jaxdiff.training.build import build_grid

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


class Variant:
    """A config with its compiled programs, kept over seeds."""

    def __init__(self, arg: str, changes: dict[str, Any], args: argparse.Namespace):
        config = digits_immiscible.get_config(arg)
        with config.unlocked():
            for name, value in changes.items():
                config.update_from_flattened_dict({name: value})
            config.train.steps = args.steps
            config.optim.decay_images = args.steps * config.data.batch_size
            config.optim.warmup_images = config.data.batch_size * args.steps // 20
            if args.tiny:
                config.model.fields.width = 8
        self.job = training.build(config)
        self.batch_size, self.sample = config.data.batch_size, config.sample
        self.step = jax.jit(self.job.method.step, donate_argnums=0)
        self.images = jnp.asarray(self.job.dataset.take(0, self.job.dataset.size)["image"])
        self.draw = jax.jit(self.job.method.sample)

    def train(self, seed: int, marks: list[int], watch: Any) -> Any:
        """The state after the last mark; `watch(step, state)` at each."""
        key = jax.random.key(seed)
        state = jax.jit(self.job.method.init)(key, {"image": self.images[: self.batch_size]})
        reduction = []
        for step in range(1, marks[-1] + 1):
            pick, drawn = jax.random.split(jax.random.fold_in(key, step))
            index = jax.random.randint(pick, (self.batch_size,), 0, len(self.images))
            state, metrics = self.step(state, {"image": self.images[index]}, drawn)
            reduction.append(metrics.get("distance_reduction", 0.0))
            if step in marks:
                watch(step, state)
        return state, float(jnp.mean(jnp.asarray(reduction)))

    def by_steps(self, state: Any, unit: Any, steps: int) -> Any:
        """Samples by the config's solver with another number of steps."""
        sigmas = build_grid(self.job.config)(steps)
        run = jax.jit(
            lambda state, unit: solvers.solve(
                self.job.method.denoiser(state), sigmas[0] * unit, sigmas, self.sample.solver, to_zero=True
            )
        )
        return run(state, unit)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--study", choices=STUDIES, required=True)
    p.add_argument("--steps", type=int, default=1000, help="of each training")
    p.add_argument("--marks", type=int, default=10, help="times a training is looked at, evenly spaced")
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--samples", type=int, default=2000, help="images behind each distance")
    p.add_argument("--out", default="runs/experiments")
    p.add_argument("--tiny", action="store_true", help="a few steps of a small network, to try the script")
    args = p.parse_args()
    if args.tiny:
        args.steps, args.marks, args.samples, args.seeds = 4, 2, 64, 1
    arg, changes = STUDIES[args.study]
    marks = [args.steps * (i + 1) // args.marks for i in range(args.marks)]
    curves: dict[str, list[list[float]]] = {}
    reductions: dict[str, float] = {}
    inference: dict[str, dict[int, list[float]]] = {}
    judge = None
    for name, change in changes.items():
        variant = Variant(arg, change, args)
        judge = judge or Judge(variant.job)
        curves[name], inference[name] = [], {}
        for seed in range(args.seeds):
            unit = jax.random.normal(jax.random.key(1000 + seed), (args.samples, *variant.job.dataset.image_shape))
            found: list[float] = []
            keys = jax.random.split(jax.random.key(seed), args.samples)
            state, reductions[name] = variant.train(
                seed,
                marks,
                lambda step, state: found.append(judge.frechet(variant.draw(state, unit, None, keys))),  # noqa: B023
            )
            curves[name].append(found)
            for steps in (5, 10, 20, 50) if args.study == "ddim" else ():
                value = judge.frechet(variant.by_steps(state, unit, steps))
                inference[name].setdefault(steps, []).append(value)
            print(f"{name}, seed {seed}: {found[-1]:.3f} after {args.steps} steps", flush=True)
    report(args, marks, curves, reductions, inference)


def report(args: Any, marks: list[int], curves: Any, reductions: Any, inference: Any) -> None:
    """Tables, the figure and the JSON file."""
    rows = [
        [name, f"{reductions[name]:.1%}", *(cell(values) for values in zip(*found, strict=True))]
        for name, found in curves.items()
    ]
    title = f"Fréchet distance in digit features by training steps, {args.seeds} seeds, {args.samples} images"
    show(title, ["assignment", "nearer by", *map(str, marks)], rows)
    first = {
        name: reached(marks, found, [curve[-1] for curve in curves[plain(name)]]) for name, found in curves.items()
    }
    rows = [[name, *(str(step or "never") for step in steps), speed_up(first, name)] for name, steps in first.items()]
    columns = [f"seed {seed}" for seed in range(args.seeds)]
    show("steps to the last distance of the baseline with the same seed", ["assignment", *columns, "speed-up"], rows)
    if any(inference.values()):
        steps = list(next(iter(inference.values())))
        rows = [[name, *(cell(found[n]) for n in steps)] for name, found in inference.items()]
        show("after training, by inference steps", ["assignment", *map(str, steps)], rows)
    print(f"\nthe paper: {CLAIMS[args.study]}")
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    record = {"settings": {k: v for k, v in vars(args).items() if k != "out"}, "marks": marks, "frechet": curves}
    record |= {"distance_reduction": reductions, "steps_to_baseline": first, "inference": inference}
    (out / f"immiscible_{args.study}.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    figure, axis = plt.subplots(figsize=(7, 4.5))
    for name, found in curves.items():
        values = np.asarray(found)
        axis.errorbar(marks, values.mean(0), values.std(0), marker="o", markersize=3, capsize=2, label=name)
    axis.set(yscale="log", xlabel="training steps", ylabel="Fréchet distance, digit features")
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out / f"immiscible_{args.study}.png", dpi=100)
    print(f"wrote immiscible_{args.study}.json and .png to {out}")


def plain(name: str) -> str:
    """The variant without assignment that `name` is to be compared with."""
    return ", ".join(["none", *name.split(", ")[1:]])


def reached(marks: list[int], curves: list[list[float]], wanted: list[float]) -> list[int | None]:
    """The first mark of each seed at which the distance was as low as wanted."""
    return [
        next((mark for mark, value in zip(marks, curve, strict=True) if value <= goal), None)
        for curve, goal in zip(curves, wanted, strict=True)
    ]


def speed_up(first: dict[str, list[int | None]], name: str) -> str:
    """How many times fewer steps than the baseline, the mean over seeds, where every seed got there."""
    pairs = list(zip(first[plain(name)], first[name], strict=True))
    ratios = [before / after for before, after in pairs if before and after]
    return f"{mean(ratios):.2f}x" if len(ratios) == len(pairs) else "not on every seed"


if __name__ == "__main__":
    main()
