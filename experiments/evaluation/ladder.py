"""How distances that need no download rank sets of images, beside FID: damaged, incomplete and generated sets.

    python -m experiments.evaluation.ladder DATA WORK [--samples=500] [--run=WORKDIR] [--out=docs/results]

DATA holds inception_fid.npz, cifar10_train.npz and cifar10_test.npz. Sets of `samples` images from the end of the
training images, which train_compact.py never saw, are damaged in one way each (damage.py; two ways are not in its
training) or lack classes or repeat images; the reference are the first 5,000 test images. `--run` is a trained run on
images: its samples at 3 to 35 evaluations are compared with its own data. WORK keeps Inception features: run the
command again to resume.

Prints each set's FID, its Fréchet distance in `compact` and the sliced Wasserstein distance of pixels, both ladders'
rank correlations with FID, and whether a distance grows with each damage.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt
from scipy import stats

import jaxdiff
from experiments.common import results
from experiments.common.photos import from_deltas
from experiments.evaluation import damage
from experiments.evaluation.train_compact import features
from jaxdiff import evaluation
from jaxdiff.training.evaluate import reference_pixels

Distances = dict[str, float]
REFERENCE, FIRST = 5000, 40_000
DAMAGES = {  # by growing strength
    "blur": (0.4, 0.8, 1.5),
    "noise": (0.03, 0.08, 0.15),
    "pixelate": (2, 4),
    "jpeg": (50, 85),
    "salt": (0.01, 0.05),
    "components": (200, 50),
    "contrast": (0.5,),
    "mix": (0.3,),
}
CLASSES = (8, 5, 2)  # that are left
NFE = (35, 17, 9, 5, 3)
MEASURES = ("fid", "compact", "sliced")


class Judges:
    """Distances to a reference set, in three measures."""

    def __init__(self, data: Path, work: Path, reference: np.ndarray) -> None:
        net = evaluation.feature_net("inception", data / "inception_fid.npz", resize="tensorflow")
        self.cache = evaluation.FeatureCache(work, net)
        self.compact = evaluation.feature_net("compact")
        self.pixels = reference
        self.moments = self._features(reference)

    def _features(self, pixels: np.ndarray) -> dict[str, evaluation.Moments]:
        own = evaluation.extract(self.compact, [pixels], batch_size=500).moments
        return {"fid": evaluation.moments_of(features(self.cache, pixels)), "compact": own}

    def __call__(self, pixels: np.ndarray) -> Distances:
        found = self._features(pixels)
        distances = {name: evaluation.frechet_distance(found[name], self.moments[name]) for name in found}
        flat = [x.reshape(len(x), -1) / 127.5 for x in (pixels, self.pixels[: len(pixels)])]
        return {**distances, "sliced": evaluation.sliced_wasserstein(*flat)}


def damaged_sets(images: np.ndarray, labels: np.ndarray, samples: int) -> dict[str, np.ndarray]:
    """Sets by name, the undamaged one first."""
    rng = np.random.default_rng(1)
    clean = images[:samples]
    sets = {"as they are": clean}
    for name, strengths in DAMAGES.items():
        sets |= {f"{name} {strength}": getattr(damage, name)(clean, strength, rng) for strength in strengths}
    sets |= {f"{count} classes": images[labels < count][:samples] for count in CLASSES}
    sets["50 images, repeated"] = clean[np.arange(samples) % 50]
    return sets


def generated_sets(workdir: Path, samples: int) -> dict[str, np.ndarray]:
    """Samples of a run at several counts of evaluations."""
    run = jaxdiff.load(workdir)
    return {f"{nfe} evaluations": _rgb(evaluation.to_uint8(run.sample(0, samples, nfe=nfe))) for nfe in NFE}


def _rgb(pixels: np.ndarray) -> np.ndarray:
    return np.broadcast_to(pixels, (*pixels.shape[:-1], 3))


def measured(judges: Judges, sets: dict[str, np.ndarray]) -> dict[str, Distances]:
    rows = {}
    for name, pixels in sets.items():
        rows[name] = judges(pixels)
        print(f"{name:20s} " + ", ".join(f"{measure} {rows[name][measure]:.3f}" for measure in MEASURES), flush=True)
    return rows


def correlations(rows: dict[str, Distances]) -> Distances:
    """Rank correlations with FID (Spearman)."""
    columns = {measure: [row[measure] for row in rows.values()] for measure in MEASURES}
    return {name: float(stats.spearmanr(columns["fid"], columns[name])[0]) for name in MEASURES[1:]}


def monotone(rows: dict[str, Distances]) -> dict[str, list[str]]:
    """For each measure the damages with which it does not grow, from the undamaged set on."""
    chains = {name: [f"{name} {strength}" for strength in strengths] for name, strengths in DAMAGES.items()}
    chains["classes"] = [f"{count} classes" for count in CLASSES]
    chains = {name: ["as they are", *chain] for name, chain in chains.items() if len(chain) > 1}
    if f"{NFE[0]} evaluations" in rows:
        chains = {"evaluations": [f"{nfe} evaluations" for nfe in NFE]}
    return {
        measure: [name for name, chain in chains.items() if (np.diff([rows[x][measure] for x in chain]) <= 0).any()]
        for measure in MEASURES
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--run", type=Path, help="workdir of a run on images")
    parser.add_argument("--out", default="results")
    args = parser.parse_args()
    ladders = {}
    if args.run:
        config = jaxdiff.load(args.run).config
        reference = _rgb(evaluation.to_uint8(reference_pixels(config, 2000)))
        ladders["generated"] = measured(Judges(args.data, args.work, reference), generated_sets(args.run, args.samples))
    with np.load(args.data / "cifar10_test.npz", allow_pickle=False) as file:
        reference = from_deltas(file["images_pd"][:, :REFERENCE])
    with np.load(args.data / "cifar10_train.npz", allow_pickle=False) as file:
        images, labels = from_deltas(file["images_pd"][:, FIRST:]), file["labels"][FIRST:]
    sets = damaged_sets(images, labels, args.samples)
    ladders["damaged"] = measured(Judges(args.data, args.work, reference), sets)
    record = {"settings": results.settings(args), "ladders": ladders}
    for name, rows in ladders.items():
        record[name] = {"correlation": correlations(rows), "not monotone": monotone(rows)}
        print(f"{name}, {len(rows)} sets: rank correlation with FID {record[name]['correlation']}")
        print(f"{name}: does not grow with {record[name]['not monotone']}")
    figure, axes = plt.subplots(1, 2, figsize=(9, 4))
    for axis, measure in zip(axes, MEASURES[1:], strict=True):
        for name, rows in ladders.items():
            points = [[row[key] for row in rows.values()] for key in ("fid", measure)]
            axis.loglog(*points, "o", label=f"{name}, rank correlation {correlations(rows)[measure]:.2f}")
        axis.set(xlabel="FID", ylabel=measure, title=measure)
        axis.legend()
    results.save(args.out, "ladder", record, figure)


if __name__ == "__main__":
    main()
