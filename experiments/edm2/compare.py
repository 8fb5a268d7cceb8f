"""A small EDM2 and a DDPM++ UNet of equal cost on the digits: Fréchet distance by hours of CPU time.

    python -m experiments.edm2.compare [--steps=2000] [--seeds=1] [--out=runs/experiments]

Both see the same images in the same order and are sampled by 18-step Heun. Each has its own recipe: configs/digits.py,
and that of EDM2 (inverse-square-root schedule, learned uncertainty, forced weights, power-function average). Cost is
counted in multiply-adds of one forward pass; hours are CPU time of the process over all cores, without compilation and
evaluation.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from experiments.common import results
from experiments.common.loops import marks_of, use_compile_cache
from experiments.common.results import plt
from experiments.common.tables import cell, show
from jaxdiff import flops, training
from jaxdiff.configs import digits
from jaxdiff.methods import exported
from jaxdiff.training import Run
from jaxdiff.training.evaluate import eval_sampler
from jaxdiff.training.sharding import make_mesh

NETWORKS = ("DDPM++", "EDM2")


def config_of(name: str, args: argparse.Namespace) -> ConfigDict:
    """configs/digits.py for `steps` steps, optionally with the network and the recipe of EDM2."""
    c = digits.get_config("tiny" if args.tiny else "")
    with c.unlocked():
        images = args.steps * c.data.batch_size
        c.optim.decay_images, c.train.steps = images, args.steps
        c.eval.samples = args.samples
        if name == "EDM2":
            del c.model.fields.style
            c.model.name, c.model.fields.channels_per_head = "edm2", 16
            c.diffusion.uncertainty = True
            c.optim.learning_rate, c.optim.options = 0.01, {"b1": 0.9, "b2": 0.99}
            c.optim.decay, c.optim.decay_images = "sqrt", max(images // 10, 1)
            c.ema.kind, c.ema.options = "power", {"sigma_rel": 0.1}
    return c


def cost(run: Run) -> int:
    """Multiply-adds of one forward pass of one image."""
    x, cond = np.zeros((1, *run.data.shape), np.float32), run.conditions.example(1)
    params = jax.eval_shape(run.model.init, jax.random.key(0), x, np.zeros(1, np.float32), cond)
    traced = jax.make_jaxpr(run.model.apply)(params, x, np.zeros(1, np.float32), cond)
    return flops.total(traced.jaxpr)


def train(run: Run, seed: int, marks: list[int]) -> tuple[list[float], list[float]]:
    """Fréchet distances at the marks, and hours of CPU time until then."""
    mesh, size = make_mesh(), run.config.data.batch_size
    sampler = eval_sampler(run, mesh)
    state = jax.jit(run.method.init)(jax.random.key(seed), run.example(size))
    step = jax.jit(run.method.step, donate_argnums=0)
    program = step.lower(state, run.select(run.data.batch(0, size)), jax.random.key(0)).compile()
    distances, hours, spent = [], [], 0.0
    begun = time.process_time()
    for i in range(marks[-1]):
        state, _ = program(state, run.select(run.data.batch(i, size)), jax.random.fold_in(jax.random.key(seed), i))
        if i + 1 in marks:
            jax.block_until_ready(state)
            spent += time.process_time() - begun
            record = training.evaluate(run, exported(state), mesh, sampler=sampler)
            assert record is not None
            distances.append(record["frechet_digits"])
            hours.append(spent / 3600)
            print(f"step {i + 1}: {distances[-1]:.3f} after {spent:.0f} CPU seconds", flush=True)
            begun = time.process_time()
    return distances, hours


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, default=2000, help="of each training, a multiple of --marks")
    p.add_argument("--marks", type=int, default=5, help="how often a training is evaluated, evenly spaced")
    p.add_argument("--seeds", type=int, default=1)
    p.add_argument("--samples", type=int, default=2000, help="images per distance")
    p.add_argument("--out", default="runs/experiments", help="folder for the JSON and PNG files")
    p.add_argument("--tiny", action="store_true", help="a few steps of small networks, to try the script")
    args = p.parse_args()
    if args.tiny:
        args.steps, args.marks, args.samples, args.seeds = 4, 2, 64, 1
    if args.steps % args.marks:
        p.error(f"--steps={args.steps} is not a multiple of --marks={args.marks}")
    use_compile_cache()
    marks = marks_of(args.steps, args.marks)
    found: dict[str, list[tuple[list[float], list[float]]]] = {}
    costs = {}
    for name in NETWORKS:
        config = config_of(name, args)
        run = training.build(config, training.load_data(config))
        costs[name] = cost(run)
        print(f"{name}: {costs[name] / 1e6:.2f} M multiply-adds per image", flush=True)
        found[name] = [train(run, seed, marks) for seed in range(args.seeds)]
    report(args, marks, found, costs)


def report(args: Any, marks: list[int], found: dict[str, list[tuple]], costs: dict[str, int]) -> None:
    """The table, the figure and the JSON file."""
    frechet = {name: [distances for distances, _ in seeds] for name, seeds in found.items()}
    hours = {name: np.mean([spent for _, spent in seeds], 0).tolist() for name, seeds in found.items()}
    rows = [
        [name, f"{costs[name] / 1e6:.2f} M", f"{3600 * hours[name][-1]:.0f} s", *map(cell, zip(*curve, strict=True))]
        for name, curve in frechet.items()
    ]
    title = f"Fréchet distance in digit features by training steps, {args.seeds} seeds, {args.samples} images"
    show(title, ["network", "multiply-adds", "CPU time", *map(str, marks)], rows)
    figure, axis = plt.subplots(figsize=(7, 4.5))
    for name, curve in frechet.items():
        axis.plot(hours[name], np.mean(curve, 0), marker="o", markersize=3, label=name)
    axis.set(yscale="log", xlabel="hours of CPU time", ylabel="Fréchet distance, digit features")
    axis.legend(fontsize=8)
    record = {"settings": results.settings(args), "marks": marks, "frechet": frechet, "hours": hours, "cost": costs}
    results.save(args.out, "edm2_compare", record, figure)


if __name__ == "__main__":
    main()
