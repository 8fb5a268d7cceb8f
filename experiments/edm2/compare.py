"""A small EDM2 and a DDPM++ UNet of equal cost: Fréchet distance by hours of CPU time.

    python -m experiments.edm2.compare [--steps=2000] [--seeds=1] [--out=runs/experiments]
    python -m experiments.edm2.compare --images=fashion32.npz --weights=efficientnet_lite0.npz --inception=inception.npz

On the digits, measured in the features of their classifier; or on images of 32x32 (experiments.images.prepare), in
those of EfficientNet-Lite0, and at the end with --inception a FID of few images. Both networks see the same images in
the same order, take turns between the marks and are sampled alike. Each has its own recipe: configs/digits.py or
configs/fashion.py, and that of EDM2 (inverse-square-root schedule, learned uncertainty, forced weights, power-function
average). Cost is counted in multiply-adds of one forward pass; hours are CPU time of the process over all cores,
without compilation and evaluation.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from experiments.common import results
from experiments.common.loops import Loop, marks_of, use_compile_cache
from experiments.common.quality import Quality
from experiments.common.results import plt
from experiments.common.tables import cell, show
from jaxdiff import evaluation, flops, training
from jaxdiff.configs import digits, fashion
from jaxdiff.files import replacing
from jaxdiff.methods import exported
from jaxdiff.training import Run
from jaxdiff.training.evaluate import eval_sampler
from jaxdiff.training.sharding import make_mesh
from jaxdiff.trees import size_of

NETWORKS = ("DDPM++", "EDM2")
NET = "efficientnet_lite0"
PIECE = 10  # steps between looks at the clock
SIDE = 128  # pixels to which images are resized for it


def config_of(name: str, args: argparse.Namespace) -> ConfigDict:
    """configs/digits.py or fashion.py for `steps` steps, optionally with the network and the recipe of EDM2."""
    c = (fashion if args.images else digits).get_config("tiny" if args.tiny else "")
    with c.unlocked():
        images = args.steps * c.data.batch_size
        c.train.steps, c.eval.samples = args.steps, args.samples
        if args.images:
            c.data.options = ConfigDict({"images": args.images})
            c.model.fields.update(width=16, channel_mult=(1, 2, 4), blocks=1)
            c.sample.solver, c.sample.timestamps = "dpmpp2m", 16
            c.sample.batch_size, c.eval.reference, c.eval.weights = 250, 5000, args.weights
        else:
            c.optim.decay_images = images
        if name == "EDM2":
            del c.model.fields.style
            c.model.name, c.model.fields.channels_per_head = "edm2", 16
            c.diffusion.uncertainty = True
            c.optim.learning_rate, c.optim.options = args.rate, {"b1": 0.9, "b2": 0.99}
            c.optim.decay, c.optim.decay_images = "sqrt", max(round(images * args.constant), 1)
            c.ema.kind, c.ema.options = "power", {"sigma_rel": args.width}
    return c


def cost(run: Run) -> int:
    """Multiply-adds of one forward pass of one image."""
    x, cond = np.zeros((1, *run.data.shape), np.float32), run.conditions.example(1)
    params = jax.eval_shape(run.model.init, jax.random.key(0), x, np.zeros(1, np.float32), cond)
    traced = jax.make_jaxpr(run.model.apply)(params, x, np.zeros(1, np.float32), cond)
    return flops.total(traced.jaxpr) // 2


class Training:
    """One network in training: its state, CPU time and distances at the marks, kept in a file if there is one."""

    def __init__(self, name: str, loop: Loop, seed: int, file: Path | None) -> None:
        self.name, self.loop, self.seed, self.file = name, loop, seed, file
        self.state = loop.init(seed)
        self.step, self.spent = 0, 0.0
        self.distances: list[float] = []
        self.hours: list[float] = []
        if file and file.is_file():
            self._read(file)

    def until(self, mark: int, quality: Callable[[], Quality], late: Callable[[], bool]) -> bool:
        """Train to the mark and measure there; False if it is late, and what was done is kept."""
        run = self.loop.run
        size, before = run.config.data.batch_size, self.step
        while self.step < mark and not late():
            steps = range(self.step, min(self.step + PIECE, mark))
            batches = (run.select(run.data.batch(i, size)) for i in steps)
            keys = (jax.random.fold_in(jax.random.key(self.seed), i) for i in steps)
            self.state, seconds = self.loop.train(self.state, batches, keys)
            self.step, self.spent = steps.stop, self.spent + seconds
        measured = self.step == mark and not late()
        if measured:
            self.distances.append(quality().measure(self.samples())["frechet"])
            self.hours.append(self.spent / 3600)
        if self.file and (measured or self.step > before):
            self._write(self.file)
        distance = f", distance {self.distances[-1]:.3f}" if measured else ""
        print(f"{self.name}, seed {self.seed}, step {self.step}: {self.spent:.0f} CPU seconds{distance}", flush=True)
        return measured

    def samples(self) -> np.ndarray:
        """Images of the parameters as they are."""
        c = self.loop.run.config.eval
        found = eval_sampler(self.loop.run, make_mesh()).batches(exported(self.state), c.samples, c.seed)
        return np.concatenate([images for images, _ in found])

    def _write(self, file: Path) -> None:
        leaves = {str(i): np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(self.state))}
        progress = {"step": self.step, "spent": self.spent, "distances": self.distances, "hours": self.hours}
        with replacing(file) as unfinished:
            np.savez(unfinished, **leaves, **progress)

    def _read(self, file: Path) -> None:
        leaves, structure = jax.tree.flatten(self.state)
        with np.load(file, allow_pickle=False) as stored:
            self.state = jax.tree.unflatten(structure, [jnp.asarray(stored[str(i)]) for i in range(len(leaves))])
            self.step, self.spent = int(stored["step"]), float(stored["spent"])
            self.distances, self.hours = stored["distances"].tolist(), stored["hours"].tolist()


def quality_of(run: Run, net: str, weights: str) -> Quality:
    """The judge of a run's samples."""
    side = SIDE if net == NET else None
    return Quality(run, evaluation.feature_net(net, weights or None, side=side))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--images", default="", help="file of images of 32x32 (experiments.images.prepare); else the digits")
    p.add_argument("--weights", default="", help="with --images: file of EfficientNet-Lite0")
    p.add_argument("--inception", default="", help="with --images: file of the FID network, for a FID of the last mark")
    p.add_argument("--networks", default=",".join(NETWORKS), help="which of them, separated by commas")
    p.add_argument("--steps", type=int, default=2000, help="of each training, a multiple of --marks")
    p.add_argument("--marks", type=int, default=5, help="how often a training is evaluated, evenly spaced")
    p.add_argument("--seeds", type=int, default=1)
    p.add_argument("--samples", type=int, default=2000, help="images per distance")
    p.add_argument("--rate", type=float, default=0.01, help="learning rate of EDM2")
    p.add_argument("--constant", type=float, default=0.1, help="part of EDM2's training before its rate decays")
    p.add_argument("--width", type=float, default=0.1, help="relative width of EDM2's average")
    p.add_argument("--state", default="", help="folder that keeps the trainings at each mark, to continue there")
    p.add_argument("--seconds", type=float, default=0.0, help="with --state: stop after so long; 0: never")
    p.add_argument("--out", default="runs/experiments", help="folder for the JSON and PNG files")
    p.add_argument("--tiny", action="store_true", help="a few steps of small networks, to try the script")
    args = p.parse_args()
    if args.tiny:
        args.steps, args.marks, args.samples, args.seeds = 4, 2, 64, 1
    if args.steps % args.marks:
        p.error(f"--steps={args.steps} is not a multiple of --marks={args.marks}")
    if args.state:
        Path(args.state).mkdir(parents=True, exist_ok=True)
    for file in (args.images, args.weights, args.inception):
        if file and not Path(file).is_file():
            p.error(f"no file {file}")
    begun = time.monotonic()
    use_compile_cache()
    marks, names = marks_of(args.steps, args.marks), args.networks.split(",")
    data = training.load_data(config_of(names[0], args))
    runs = {name: training.build(config_of(name, args), data) for name in names}
    costs = {name: cost(run) for name, run in runs.items()}
    for name, run in runs.items():
        parameters = size_of(jax.eval_shape(run.method.init, jax.random.key(0), run.example(1)).params["student"])
        print(f"{name}: {parameters / 1e6:.2f} M values, {costs[name] / 1e6:.2f} M multiply-adds per image", flush=True)
    quality = cache(lambda: quality_of(runs[names[0]], NET if args.images else "digits", args.weights))
    loops = {name: Loop(run, time.process_time) for name, run in runs.items()}
    found: dict[str, list[Training]] = {name: [] for name in names}

    def late() -> bool:
        return 0 < args.seconds < time.monotonic() - begun

    for seed in range(args.seeds):
        for name, loop in loops.items():
            file = Path(args.state) / f"{name}_{seed}.npz" if args.state else None
            found[name].append(Training(name, loop, seed, file))
        for i, mark in enumerate(marks):
            for one in (found[name][seed] for name in names):
                if len(one.hours) <= i and not one.until(mark, quality, late):
                    return
    report(args, marks, found, costs, fids(args, found))


def fids(args: argparse.Namespace, found: dict[str, list[Training]]) -> dict[str, list[float]]:
    """FID of the last samples of each training, of so few images that it is comparable among these only."""
    if not args.inception:
        return {}
    (first, *_), *_ = found.values()
    config = first.loop.run.config
    with config.unlocked():
        config.eval.reference = args.samples
    judge = quality_of(first.loop.run, "inception", args.inception)
    return {name: [judge.measure(one.samples())["frechet"] for one in seeds] for name, seeds in found.items()}


def report(
    args: argparse.Namespace,
    marks: list[int],
    found: dict[str, list[Training]],
    costs: dict[str, int],
    fid: dict[str, list[float]],
) -> None:
    """The table, the figure and the JSON file."""
    frechet = {name: [one.distances for one in seeds] for name, seeds in found.items()}
    hours = {name: np.mean([one.hours for one in seeds], 0).tolist() for name, seeds in found.items()}
    rows = [
        [name, f"{costs[name] / 1e6:.2f} M", f"{3600 * hours[name][-1]:.0f} s", *map(cell, zip(*curve, strict=True))]
        + [cell(values) for values in (fid.get(name),) if values]
        for name, curve in frechet.items()
    ]
    features = "EfficientNet-Lite0 features" if args.images else "digit features"
    title = f"Fréchet distance in {features} by training steps, {args.seeds} seeds, {args.samples} images"
    columns = ["network", "multiply-adds", "CPU time", *map(str, marks), *["FID at the end"] * bool(fid)]
    show(title, columns, rows)
    figure, axis = plt.subplots(figsize=(7, 4.5))
    for name, curve in frechet.items():
        label = name if not fid else f"{name} (FID at the end {cell(fid[name])})"
        axis.plot(hours[name], np.mean(curve, 0), marker="o", markersize=3, label=label)
    axis.set(yscale="log", xlabel="hours of CPU time", ylabel=f"Fréchet distance, {features}")
    axis.legend(fontsize=8)
    record = {"settings": results.settings(args), "marks": marks, "frechet": frechet, "hours": hours, "cost": costs}
    results.save(args.out, "edm2_compare", record | {"fid": fid}, figure)


if __name__ == "__main__":
    main()
