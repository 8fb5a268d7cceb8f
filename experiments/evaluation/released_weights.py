"""Checks feature networks and an autoencoder with their released weights on real photos; exits non-zero on a failure.

    python -m experiments.evaluation.released_weights FOLDER

FOLDER holds lpips_alex.npz, taef2_vae.npz and efficientnet_lite0.npz under the names `weights.load` reads, and the
photos cifar10_test.npz (with `labels`) and pets64.npz. Photos are `images_pd` [3 n h w], uint8 plane differences:
cumulative sums along height and width give the planes G, R - G and B - G. The test suite needs none of these files: it
compares the same networks with their public programs on seeded weights.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np

from experiments.common.photos import from_deltas
from jaxdiff import autoencoders, weights
from jaxdiff.evaluation import extract, feature_net, frechet_distance
from jaxdiff.models import LPIPS, TAESD


def photos(path: Path, count: int) -> np.ndarray:
    """The first images [n h w 3] in [-1, 1]."""
    with np.load(path, allow_pickle=False) as file:
        images = from_deltas(file["images_pd"][:, :count])
    return images / np.float32(127.5) - np.float32(1)


def noisy(images: np.ndarray, level: float) -> np.ndarray:
    return images + np.float32(level) * np.random.default_rng(0).standard_normal(images.shape, np.float32)


def check(condition: bool, claim: str) -> None:
    if not condition:
        raise SystemExit(f"failed: {claim}")
    print(f"holds: {claim}")


def lpips(folder: Path) -> None:
    model, params = weights.load(folder / "lpips_alex.npz", "lpips")
    check(model == LPIPS("alex"), "lpips_alex.npz is read as LPIPS('alex')")
    check(all((params[f"lin{i}"] >= 0).all() for i in range(5)), "no head of LPIPS has a negative weight")
    distance = jax.jit(lambda a, b: model.apply({"params": params}, a, b))
    x = photos(folder / "pets64.npz", 2)
    levels = [distance(x, noisy(x, level)) for level in (0.0, 0.02, 0.05, 0.1, 0.2, 0.4)]
    check(bool((levels[0] == 0).all() and (np.diff(levels, axis=0) > 0).all()), "LPIPS grows with noise")
    rough = noisy(x, 0.3)
    widths = [distance(rough, sum(np.roll(rough, k, 2) for k in range(n)) / np.float32(n)) for n in (1, 2, 3, 5)]
    check(bool((np.diff(widths, axis=0) > 0).all()), "LPIPS grows with blur")


def autoencoder(folder: Path) -> None:
    model, params = weights.load(folder / "taef2_vae.npz", "taesd")
    check(model == TAESD(channels=32, pool=True), "taef2_vae.npz is read as TAESD(channels=32, pool=True)")
    images = photos(folder / "pets64.npz", 128)
    again = autoencoders.decode(model, params, autoencoders.encode(model, params, images))
    ratio = 10 * np.log10(4 / np.square(images - again).mean())
    check(ratio > 25.2, f"taef2 gives photos of 64 pixels back at {ratio:.1f} dB, its published 25.2 or more")


def efficientnet(folder: Path) -> None:
    net = feature_net("efficientnet_lite0", folder / "efficientnet_lite0.npz", side=96)
    images = photos(folder / "cifar10_test.npz", 240)
    with np.load(folder / "cifar10_test.npz", allow_pickle=False) as file:
        labels = file["labels"][:240]
    x, y = np.split(images, 2)
    blurred = sum(np.roll(y, (i, j), (1, 2)) for i in (-1, 0, 1) for j in (-1, 0, 1)) / np.float32(9)
    sets = [extract(net, np.split(part, 3), keep=True) for part in (x, y, blurred, noisy(y, 0.5))]
    axes = np.linalg.svd(sets[0].features - sets[0].moments.mean, full_matrices=False)[2]
    half, *others = (part.features @ axes[:16].T for part in sets)  # 120 images determine no more directions
    distances = [frechet_distance(half, other) for other in others]
    check(distances[0] * 1.5 < distances[1] < distances[2], "Frechet distance: real < blurred < noisy photos")
    nearest = np.linalg.norm(sets[0].features[:, None] - sets[1].features, axis=-1).argmin(0)
    accuracy = (labels[:120][nearest] == labels[120:]).mean()
    check(accuracy > 0.3, f"the nearest neighbour in features has the same class in {accuracy:.0%} (chance is 10 %)")


def main(arguments: list[str]) -> None:
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        raise SystemExit(f"give the folder of weights and photos as the only argument, got {arguments}\n\n{__doc__}")
    folder = Path(arguments[0])
    for part in (lpips, autoencoder, efficientnet):
        part(folder)


if __name__ == "__main__":
    main(sys.argv[1:])
