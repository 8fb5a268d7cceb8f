"""Trains `compact`, the feature network that comes with jaxdiff, to predict features of the FID Inception.

    python -m experiments.evaluation.train_compact DATA WORK [--out=FILE.npz]

DATA holds inception_fid.npz, cifar10_train.npz, fashion_mnist.npz and emoji32.npz (released_weights.py and
images/prepare.py say what is in them). WORK keeps the Inception's features as they are computed: run the command again
to resume. Targets are the 128 leading principal components of the features of 14,000 images: 5,000 of CIFAR-10 as they
are, 6,000 others damaged (damage.py), 1,500 of Fashion-MNIST and 1,500 emoji. The loss is the mean squared error in
units of the features, images are mirrored at random. About 35 CPU minutes, most of it the Inception.

Prints the share of the targets' variance that is explained, in training and on 1,000 held-out images of CIFAR-10, by
the weights as they are stored (float16), and the sha256 of the file.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict

from experiments.common.photos import from_deltas
from experiments.evaluation import damage
from experiments.images.prepare import read
from jaxdiff import compilation
from jaxdiff.evaluation import FeatureCache, compact, digest, extract_cached, feature_net

EPOCHS, BATCH, DECAY = 30, 128, 0.998
FILES = ("inception_fid", "cifar10_train", "fashion_mnist", "emoji32")


def images(data: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images [n 32 32 3] uint8 to train on, and held-out ones."""
    rng = np.random.default_rng(0)
    with np.load(data / "cifar10_train.npz", allow_pickle=False) as file:
        cifar = from_deltas(file["images_pd"][:, :12_000])
    clothes = read(data / "fashion_mnist.npz", "train")["images"][:1500].repeat(3, -1)
    with np.load(data / "emoji32.npz", allow_pickle=False) as file:
        emoji = file["images"][rng.permutation(len(file["images"]))[:1500]]
    return np.concatenate([cifar[:5000], damage.drawn(cifar[5000:11_000], rng), clothes, emoji]), cifar[11_000:]


def features(cache: FeatureCache, pixels: np.ndarray) -> np.ndarray:
    """Inception features, from the cache where they are."""

    def batches():
        for start in range(0, len(pixels), 32):
            if start % 512 == 0:
                print(f"Inception: {start} of {len(pixels)}", flush=True)
            yield pixels[start : start + 32]

    found = extract_cached(cache, batches(), keep=True).features
    assert found is not None
    return found


def components(rows: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and the leading principal directions [d, count]."""
    mean = rows.mean(0, dtype=np.float64)
    _, vectors = np.linalg.eigh(np.cov(rows - mean, rowvar=False))
    return mean.astype(np.float32), vectors[:, ::-1][:, :count].astype(np.float32)


def train(pixels: np.ndarray, targets: np.ndarray, seed: int = 0) -> dict:
    """Parameters averaged over the last steps of AdamW."""
    model, rng = compact.Compact(features=targets.shape[1]), np.random.default_rng(seed)
    params = jax.jit(model.init)(jax.random.key(seed), compact.preprocess(pixels[:1]))["params"]
    params["out"]["bias"] = jnp.asarray(targets.mean(0))
    steps = EPOCHS * (len(pixels) // BATCH)
    optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 2e-3, steps // 20, steps), weight_decay=1e-2)
    scale = targets.var(0).sum()

    def loss(params: dict, x: jax.Array, y: jax.Array) -> jax.Array:
        out = model.apply({"params": params}, compact.preprocess(x))["features"]
        return jnp.square(out - y).sum(1).mean() / scale

    def step(params: dict, average: dict, state: optax.OptState, x: jax.Array, y: jax.Array) -> tuple:
        value, grad = jax.value_and_grad(loss)(params, x, y)
        updates, state = optimizer.update(grad, state, params)
        params = optax.apply_updates(params, updates)
        return params, optax.incremental_update(params, average, 1 - DECAY), state, value

    compiled = jax.jit(step, compiler_options=compilation.options(jax.default_backend()))
    average, state, seen = params, optimizer.init(params), []
    for epoch in range(EPOCHS):
        order = rng.permutation(len(pixels))[: len(pixels) // BATCH * BATCH].reshape(-1, BATCH)
        for rows in order:
            mirrored = rng.random(BATCH) < 0.5
            x = np.where(mirrored[:, None, None, None], pixels[rows][:, :, ::-1], pixels[rows])
            params, average, state, value = compiled(params, average, state, jnp.asarray(x), jnp.asarray(targets[rows]))
            seen.append(value)
        print(f"epoch {epoch + 1}: unexplained {np.mean(seen[-len(order) :]):.3f}", flush=True)
    return average


def explained(model: compact.Compact, params: dict, pixels: np.ndarray, targets: np.ndarray) -> float:
    """The share of the variance of the targets."""
    run = jax.jit(lambda x: model.apply({"params": params}, compact.preprocess(x))["features"])
    out = np.concatenate([run(pixels[i : i + 500]) for i in range(0, len(pixels), 500)])
    return float(1 - np.square(out - targets).sum() / np.square(targets - targets.mean(0)).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--out", type=Path, default=compact.WEIGHTS, help="where to write the weights (.npz)")
    args = parser.parse_args()
    for name in FILES:
        if not (args.data / f"{name}.npz").is_file():
            raise SystemExit(f"there is no {args.data / name}.npz\n\n{__doc__}")
    cache = FeatureCache(args.work, feature_net("inception", args.data / "inception_fid.npz", resize="tensorflow"))
    pixels, held = images(args.data)
    rows, held_rows = features(cache, pixels), features(cache, held)
    mean, directions = components(rows, compact.Compact.features)
    targets, held_targets = (rows - mean) @ directions, (held_rows - mean) @ directions
    print(f"{targets.shape[1]} components have {targets.var(0).sum() / rows.var(0).sum():.3f} of the variance")
    params = train(pixels, targets)
    flat = {".".join(path): np.asarray(leaf, np.float16) for path, leaf in flatten_dict(params).items()}
    np.savez(args.out, **flat)
    model, stored, _ = compact.load(args.out)
    for name, x, y in (("training", pixels, targets), ("held-out", held, held_targets)):
        print(f"{name}: {explained(model, stored, x, y):.3f} of the variance explained")
    size = sum(leaf.size for leaf in flat.values())
    print(f"{size} parameters, {args.out.stat().st_size} bytes, sha256 {digest(args.out)}")


if __name__ == "__main__":
    main()
