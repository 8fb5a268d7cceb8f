"""Segmentation from features: an ensemble of pixel MLPs for a handful of labels, a dense head for many; mean IoU.

    vote          the class most members choose, the lowest on a tie
    disagreement  entropy of the mean probability less the mean entropy (Baranchuk et al. 2022): 0 when all agree

    IoU of a class  pixels both labelled and predicted as it, over pixels labelled or predicted as it

Pixels labelled IGNORE are excluded, from training and from the IoU, whatever is predicted there; classes that are
neither labelled nor predicted are left out of the mean. The code of Meng et al. for few labels differs in both: a class
predicted on an ignored pixel counts to its union, and an absent class counts as 0, so its means are lower. The MLPs see
channels standardised over the training pixels instead of the reference's batch norm, and train for a fixed number of
steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

from jaxdiff.features.fitting import fit
from jaxdiff.methods.method import update
from jaxdiff.trees import AnyArray, Params, Tree

IGNORE = 255


def confusion(predicted: ArrayLike, truth: ArrayLike, classes: int) -> np.ndarray:
    """Counts [truth, predicted] over the pixels whose label is not IGNORE; sum them over batches."""
    predicted, truth = np.asarray(predicted).ravel(), np.asarray(truth).ravel()
    if predicted.shape != truth.shape:
        raise ValueError(f"predictions and labels differ in size: {predicted.size} and {truth.size}")
    seen = truth != IGNORE
    bad = truth[seen][(truth[seen] < 0) | (truth[seen] >= classes)]
    if bad.size:
        raise ValueError(f"label {bad[0]} is not one of {classes} classes; unlabelled pixels are {IGNORE}")
    pairs = truth[seen].astype(np.int64) * classes + predicted[seen]
    return np.bincount(pairs, minlength=classes**2).reshape(classes, classes)


def iou(counts: ArrayLike) -> np.ndarray:
    """Intersection over union of each class; NaN for classes absent from both labels and predictions."""
    counts = np.asarray(counts, np.float64)
    hit = np.diag(counts)
    union = counts.sum(0) + counts.sum(1) - hit
    return np.divide(hit, union, out=np.full_like(hit, np.nan), where=union > 0)


def mean_iou(predicted: ArrayLike, truth: ArrayLike, classes: int) -> float:
    """The IoU accumulated over all pixels, averaged over classes that occur.

    Pixels labelled IGNORE count neither as hits nor in a union, whatever is predicted there.
    """
    return float(np.nanmean(iou(confusion(predicted, truth, classes))))


# ------------------------------------------------------------------------------------------ few labels


class PixelMLP(nn.Module):
    """C -> hidden -> classes."""

    classes: int
    hidden: tuple[int, ...] = (128, 32)

    @nn.compact
    def __call__(self, x: Float[Array, "m c"]) -> Float[Array, "m k"]:
        for i, width in enumerate(self.hidden):
            x = nn.relu(nn.Dense(width, name=f"hidden{i}")(x))
        return nn.Dense(self.classes, name="out")(x)


class PixelEnsemble(NamedTuple):
    """Trained members and the statistics of their inputs."""

    model: PixelMLP
    params: Params  # stacked along the first axis
    mean: np.ndarray
    scale: np.ndarray

    def predict(self, features: Float[AnyArray, "... c"]) -> tuple[np.ndarray, np.ndarray]:
        """Classes by vote and disagreement, each of the leading shape."""
        rows = (jnp.asarray(features, jnp.float32) - self.mean) / self.scale
        votes, gap = _vote(self.model, self.params, rows.reshape(-1, rows.shape[-1]))
        return np.asarray(votes).reshape(rows.shape[:-1]), np.asarray(gap).reshape(rows.shape[:-1])


@partial(jax.jit, static_argnums=0)
def _vote(model: PixelMLP, params: Params, rows: Array) -> tuple[Array, Array]:
    return vote(jax.vmap(lambda p: jnp.asarray(model.apply({"params": p}, rows)))(params))


def vote(logits: Float[Array, "e m k"]) -> tuple[Array, Array]:
    """Majority class and disagreement of the members."""
    votes = jax.nn.one_hot(logits.argmax(-1), logits.shape[-1]).sum(0).argmax(-1)
    share = jax.nn.softmax(logits)
    entropy = lambda p: jax.scipy.special.entr(p).sum(-1)  # noqa: E731
    return votes, entropy(share.mean(0)) - entropy(share).mean(0)


def fit_pixels(
    features: Float[AnyArray, "... c"],
    labels: ArrayLike,
    classes: int,
    *,
    members: int = 10,
    hidden: tuple[int, ...] = (128, 32),
    steps: int = 1000,
    batch: int = 64,
    rate: float = 1e-3,
    seed: int = 0,
) -> PixelEnsemble:
    """`members` MLPs trained on labelled pixels in parallel, each with its own initialisation and order."""
    rows = np.asarray(features, np.float32).reshape(-1, np.shape(features)[-1])
    labels = np.asarray(labels).reshape(-1)
    if len(rows) != len(labels) or members < 1:
        raise ValueError(f"{len(rows)} pixels have {len(labels)} labels; resize the masks to the features' grid")
    rows, labels = rows[labels != IGNORE], labels[labels != IGNORE]
    if not len(rows):
        raise ValueError(f"every pixel is labelled {IGNORE} (ignored); label some pixels")
    mean, scale = rows.mean(0), np.maximum(rows.std(0), 1e-6)
    model = PixelMLP(classes, hidden)
    keys = jax.random.split(jax.random.key(seed), members)
    data = jnp.asarray((rows - mean) / scale), jnp.asarray(labels, jnp.int32)
    return PixelEnsemble(model, _train_pixels(model, steps, batch, rate, keys, *data), mean, scale)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _train_pixels(model: PixelMLP, steps: int, batch: int, rate: ArrayLike, keys: Array, x: Array, y: Array) -> Params:
    optimizer = optax.adam(rate)

    def loss(params: Params, x: Array, y: Array) -> Array:
        return optax.softmax_cross_entropy_with_integer_labels(model.apply({"params": params}, x), y).mean()

    def train(key: Array) -> Params:
        first, order = jax.random.split(key)
        params = model.init(first, x[:1])["params"]

        def step(carry: tuple[Params, Tree], key: Array) -> tuple[tuple[Params, Tree], None]:
            params, state = carry
            rows = jax.random.randint(key, (batch,), 0, len(x))
            return update(optimizer, jax.grad(loss)(params, x[rows], y[rows]), state, params), None

        return jax.lax.scan(step, (params, optimizer.init(params)), jax.random.split(order, steps))[0][0]

    return jax.vmap(train)(keys)


# ------------------------------------------------------------------------------------------ many labels


class DenseHead(nn.Module):
    """Each activation projected to `width`, resized to the finest grid and summed; 3x3 convolution; classes."""

    classes: int
    size: tuple[int, int]  # of the masks
    width: int = 64

    @nn.compact
    def __call__(self, features: Mapping[str, Float[Array, "b _ _ _"]]) -> Float[Array, "b h w k"]:
        finest = max((value.shape[1:3] for value in features.values()), key=max)
        total = jnp.zeros(())
        for i, name in enumerate(sorted(features)):
            value = features[name].astype(jnp.float32)
            h = nn.Dense(self.width, name=f"project{i}")(nn.LayerNorm(name=f"norm{i}")(value))
            total = total + jax.image.resize(h, (h.shape[0], *finest, self.width), "bilinear")
        h = nn.relu(nn.Conv(self.width, (3, 3), name="conv")(nn.relu(total)))
        logits = nn.Dense(self.classes, name="out")(h)
        return jax.image.resize(logits, (logits.shape[0], *self.size, self.classes), "bilinear")


def fit_dense(
    features: Mapping[str, ArrayLike],
    masks: ArrayLike,
    classes: int,
    *,
    width: int = 64,
    steps: int = 300,
    batch: int = 16,
    rate: float = 1e-3,
    decay: float = 1e-3,
    seed: int = 0,
) -> tuple[DenseHead, Params, list[float]]:
    """The head, its parameters and the losses, from features {name: [n h w c]} and masks [n H W] of any finer size."""
    masks = np.asarray(masks)
    arrays = {name: np.asarray(value, np.float32) for name, value in features.items()}
    for name, value in arrays.items():
        if len(value) != len(masks):
            raise ValueError(f"{name} has {len(value)} images and there are {len(masks)} masks")
    head = DenseHead(classes, masks.shape[1:3], width)
    first = {name: jnp.asarray(value[:1]) for name, value in arrays.items()}
    params = jax.jit(head.init)(jax.random.key(seed), first)["params"]

    def loss(params: Params, some: Tree) -> Array:
        return masked_loss(jnp.asarray(head.apply({"params": params}, some["features"])), some["masks"])

    data = {"features": arrays, "masks": masks.astype(np.int32)}
    params, losses = fit(loss, params, data, steps=steps, batch=batch, rate=rate, decay=decay, seed=seed)
    return head, params, losses


def masked_loss(logits: Float[Array, "b h w k"], labels: Array) -> Array:
    """Mean cross-entropy over pixels that are not IGNORE."""
    seen = labels != IGNORE
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(seen, labels, 0))
    return jnp.where(seen, losses, 0).sum() / jnp.maximum(seen.astype(jnp.float32).sum(), 1)
