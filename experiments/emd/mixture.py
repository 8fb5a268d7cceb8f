"""25 Gaussians in the plane: does a one-step generator cover them all? EMD against Diff-Instruct, same updates.

    python -m experiments.emd.mixture --out=runs/experiments

The teacher is the exact denoiser, generator and student score are small networks that start untrained
(configs/mixture2d_emd.py). A mode is covered when a fifth of its fair share of 10,000 samples lies within three
standard deviations of it.
"""

from __future__ import annotations

import argparse
import tempfile
from statistics import mean
from typing import Any

import numpy as np

from experiments.common import results
from experiments.common.results import plt
from experiments.common.tables import cell, show, show_verdicts
from jaxdiff import evaluation, training
from jaxdiff.configs import mixture2d_emd
from jaxdiff.data import mixture_components

WAYS = {"EMD": "", "Diff-Instruct": "diff_instruct"}
MEASURES = ("modes", "inside", "precision", "recall", "coverage", "sliced_wasserstein")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", default="runs/experiments", help="folder for the JSON and PNG files")
    p.add_argument("--iterations", type=int, default=0, help="generator updates; 0 = the config's")
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--first_seed", type=int, default=0, help="seeds are counted from here")
    p.add_argument("--samples", type=int, default=10_000)
    p.add_argument("--tiny", action="store_true", help="a few iterations, to try the script")
    args = p.parse_args()
    if args.tiny:
        args.iterations, args.samples = 3, 500
    points, rows, names = {}, {}, ("modes", "recall")
    for way, arg in WAYS.items():
        found = [distil(arg, args.first_seed + seed, args) for seed in range(args.seeds)]
        points[way], rows[way] = found[0][0], [scores for _, scores in found]
    table = [[way, *(cell([scores[m] for scores in rows[way]]) for m in MEASURES)] for way in WAYS]
    show(f"{args.seeds} seeds from {args.first_seed}, {args.samples} samples", ["", *MEASURES], table)
    average = {way: {name: mean(scores[name] for scores in rows[way]) for name in names} for way in WAYS}
    verdicts = {
        "EMD covers at least 24 of 25 modes on every seed": min(scores["modes"] for scores in rows["EMD"]) >= 24,
        "EMD has the higher recall": average["EMD"]["recall"] > average["Diff-Instruct"]["recall"],
    }
    show_verdicts(verdicts)
    record = {"rows": rows, "verdicts": verdicts, "settings": results.settings(args)}
    results.save(args.out, "emd_mixture", record, draw(points))


def distil(arg: str, seed: int, args: argparse.Namespace) -> tuple[np.ndarray, dict[str, float]]:
    """Samples of a generator and what they cover."""
    config = mixture2d_emd.get_config(arg)
    with config.unlocked():
        config.seed, config.train.eval_every = seed, 0
        config.train.steps = args.iterations or config.train.steps
        config.train.save_every = config.train.steps
        config.optim.decay_images = config.data.batch_size * config.train.steps
        config.sample.batch_size = 1000
    with tempfile.TemporaryDirectory() as workdir:
        training.train(config, workdir, quiet=True)
        found = training.load(workdir).sample(200 + seed, args.samples).astype(np.float64)
    data = training.load_data(config).take(0, args.samples)["image"]
    return found, cover(found, np.asarray(data, np.float64), config)


def cover(found: np.ndarray, data: np.ndarray, config: Any) -> dict[str, float]:
    """How many modes the samples cover, how many lie in one, and their distances to the data."""
    options = config.data.options
    means = np.asarray(mixture_components(preset=options.preset, std=options.std)[0])
    distance = np.linalg.norm(found[:, None] - means[None], axis=-1)
    inside = distance.min(1) < 3 * options.std
    counts = np.bincount(distance.argmin(1)[inside], minlength=len(means))
    near = evaluation.prdc(data[:5000], found[:5000])
    return {
        "modes": int((counts >= len(found) / len(means) / 5).sum()),
        "inside": float(inside.mean()),
        "sliced_wasserstein": evaluation.sliced_wasserstein(found, data),
        **{name: float(near[name]) for name in ("precision", "recall", "coverage")},
    }


def draw(points: dict[str, np.ndarray]) -> Any:
    figure, axes = plt.subplots(1, len(points), figsize=(5 * len(points), 5), squeeze=False)
    for axis, (way, found) in zip(axes[0], points.items(), strict=True):
        axis.scatter(*found[:5000].T, s=1, alpha=0.4)
        axis.set(title=way, xlim=(-1.5, 1.5), ylim=(-1.5, 1.5), aspect="equal")
    return figure


if __name__ == "__main__":
    main()
