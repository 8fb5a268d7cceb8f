"""Trains the classifier of the embedded 8x8 digits and writes the weights that come with jaxdiff.

    python -m experiments.evaluation.train_digits_classifier

About a minute on two cores. It prints the accuracy on the fifth of the images it never saw, of the weights as they
are stored (float16), and the sha256 of the file. The split, the initialisation and the augmentation are seeded.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict
from sklearn.datasets import load_digits

from jaxdiff.evaluation import classifier, digest

EPOCHS, BATCH, DECAY = 120, 128, 0.995


def split(seed: int = 0) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """(images, labels) to train on and held out, 4 to 1; pixels 0..16 become [-1, 1]."""
    digits = load_digits()
    images = (digits.images / 8 - 1).astype(np.float32)[..., None]
    order = np.random.default_rng(seed).permutation(len(images))
    held = len(images) // 5
    return (images[order[held:]], digits.target[order[held:]]), (images[order[:held]], digits.target[order[:held]])


def augment(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Most images moved by at most one pixel along one axis, all with a little noise: 8x8 pixels allow no more."""
    moves = [(0, 0), (0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)]
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=-1)
    shifted = [padded[:, 1 + y : 9 + y, 1 + x : 9 + x] for y, x in moves]
    chosen = np.stack(shifted)[rng.integers(len(moves), size=len(images)), np.arange(len(images))]
    return chosen + 0.1 * rng.standard_normal(chosen.shape, np.float32)


def train(images: np.ndarray, labels: np.ndarray, seed: int = 0) -> dict:
    """Parameters averaged over the last steps of AdamW on label-smoothed cross entropy."""
    model, rng = classifier.DigitsClassifier(), np.random.default_rng(seed)
    params = jax.jit(model.init)(jax.random.key(seed), images[:1])["params"]
    steps = EPOCHS * (len(images) // BATCH)
    optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 3e-3, steps // 20, steps), weight_decay=1e-2)

    def loss(params: dict, x: jax.Array, y: jax.Array) -> jax.Array:
        target = optax.smooth_labels(jax.nn.one_hot(y, 10), 0.05)
        return optax.softmax_cross_entropy(model.apply({"params": params}, x)["logits"], target).mean()

    @jax.jit
    def step(params: dict, average: dict, state: optax.OptState, x: jax.Array, y: jax.Array) -> tuple:
        updates, state = optimizer.update(jax.grad(loss)(params, x, y), state, params)
        params = optax.apply_updates(params, updates)
        return params, optax.incremental_update(params, average, 1 - DECAY), state

    average, state = params, optimizer.init(params)
    for _ in range(EPOCHS):
        order = rng.permutation(len(images))[: len(images) // BATCH * BATCH].reshape(-1, BATCH)
        for rows in order:
            x = jnp.asarray(augment(images[rows], rng))
            params, average, state = step(params, average, state, x, jnp.asarray(labels[rows]))
    return average


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=classifier.WEIGHTS, help="where to write the weights (.npz)")
    out = parser.parse_args().out
    (images, labels), (held, truth) = split()
    params = train(images, labels)
    flat = {".".join(path): np.asarray(leaf, np.float16) for path, leaf in flatten_dict(params).items()}
    np.savez(out, **flat)
    model, stored, _ = classifier.load(out)
    for name, x, y in (("training", images, labels), ("held-out", held, truth)):
        right = np.asarray(jax.jit(model.apply)({"params": stored}, x)["logits"]).argmax(-1) == y
        print(f"{name} accuracy {right.mean():.4f} ({right.sum()} of {len(right)})")
    print(f"{sum(leaf.size for leaf in flat.values())} parameters, {out.stat().st_size} bytes, sha256 {digest(out)}")


if __name__ == "__main__":
    main()
