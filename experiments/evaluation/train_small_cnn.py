"""Trains the small network of jaxdiff/evaluation/small_cnn.py; about half an hour on one CPU core.

    python -m experiments.evaluation.train_small_cnn DATA OUT.npz [--steps=1500]

DATA holds cifar10_train.npz and cifar10_test.npz (`images_pd` and `labels`, see released_weights.py), fashion_mnist.npz
and emoji32.npz. One classifier is trained on all three: 10 + 10 classes and the groups of the emoji. Its convolutions
are stored in float16, without the classes.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict

from experiments.common.photos import from_deltas
from jaxdiff.evaluation.small_cnn import SmallCNN

BATCH, RATE = 128, 2e-3


def read(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Training images [n 32 32 3] uint8 and their classes over all sets, then CIFAR-10's test images and labels."""
    with np.load(folder / "cifar10_train.npz", allow_pickle=False) as file:
        images, labels = ([from_deltas(file["images_pd"])], [file["labels"].astype(np.int32)])
    with np.load(folder / "fashion_mnist.npz", allow_pickle=False) as file:
        grey = np.pad(file["x_train"][:20_000], ((0, 0), (2, 2), (2, 2)))
        images.append(np.repeat(grey[..., None], 3, axis=-1))
        labels.append(10 + file["y_train"][:20_000].astype(np.int32))
    with np.load(folder / "emoji32.npz", allow_pickle=False) as file:
        images.append(file["images"])
        labels.append(20 + file["group"][file["caption_id"]].astype(np.int32))
    with np.load(folder / "cifar10_test.npz", allow_pickle=False) as file:
        test, truth = from_deltas(file["images_pd"]), file["labels"]
    return np.concatenate(images), np.concatenate(labels), test, truth


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=1500)
    args = parser.parse_args()
    images, labels, test, truth = read(args.data)
    print(f"{len(images)} images of {labels.max() + 1} classes", flush=True)
    model = SmallCNN(int(labels.max()) + 1, loop=True)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 32, 32, 3)))["params"]
    optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, RATE, 100, args.steps), weight_decay=1e-3)
    opt_state = optimizer.init(params)

    def loss_of(params, x, y):
        logits = model.apply({"params": params}, x.astype(jnp.float32) / 127.5 - 1)["logits"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    @jax.jit
    def step(params, opt_state, x, y):
        loss, gradient = jax.value_and_grad(loss_of)(params, x, y)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    rng, begin = np.random.default_rng(0), time.process_time()
    for i in range(args.steps):
        rows = rng.integers(0, len(images), BATCH)
        batch = images[rows]
        flips = rng.random(BATCH) < 0.5
        batch[flips] = batch[flips, :, ::-1]
        params, opt_state, loss = step(params, opt_state, batch, labels[rows])
        if i % 100 == 0:
            print(f"step {i} loss {float(loss):.3f} after {time.process_time() - begin:.0f} CPU seconds", flush=True)
    classify = jax.jit(lambda p, x: model.apply({"params": p}, x.astype(jnp.float32) / 127.5 - 1)["logits"].argmax(-1))
    found = np.concatenate([classify(params, test[i : i + 500]) for i in range(0, len(test), 500)])
    print(f"accuracy on CIFAR-10's test images {(found == truth).mean():.3f}")
    kept = {name: value for name, value in params.items() if name != "classes"}
    np.savez(args.out, **{".".join(path): np.asarray(v, np.float16) for path, v in flatten_dict(kept).items()})


if __name__ == "__main__":
    main()
