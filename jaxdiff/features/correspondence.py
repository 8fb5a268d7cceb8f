"""Semantic correspondence: matching points between images by cosine similarity, directly or after a trained layer.

Points are (x, y) in pixels of an image of `size` = (height, width); pixel centres are integers. Features
[b h w c] of any grid are resized to `size` bilinearly, so that a cell covers the pixels it was computed from.

    PCK@alpha  the fraction of keypoints found within alpha max(height, width) of the image, or of the object's box
    training   cross-entropy over all positions, logits cos / temperature, from either image to the other
               (Luo et al. 2023; Meng et al. 2024, whose head is one 3x3 convolution)
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float
from numpy.typing import ArrayLike

from jaxdiff.errors import choose
from jaxdiff.features.fitting import fit
from jaxdiff.trees import AnyArray, Params

Size = tuple[int, int]
SCALES = ("none", "unit")  # of concatenated activations


def concatenate(features: Mapping[str, AnyArray], size: Size, scale: str = "none") -> Float[Array, "b h w c"]:
    """Several activations resized to one grid, their channels joined; an image's features depend on no other image.

    scale "none" keeps the values, as Meng et al. do, so activations of large norm dominate cosines; "unit" divides each
    activation of each image by its root mean square first.
    """
    choose(scale, SCALES, "scale")
    resized = [_resize(jnp.asarray(value), size) for value in features.values()]
    if scale == "unit":
        resized = [f * jax.lax.rsqrt(jnp.square(f).mean((1, 2, 3), keepdims=True) + 1e-12) for f in resized]
    return jnp.concatenate(resized, axis=-1)


def _resize(f: Float[Array, "b h w c"], size: Size) -> Float[Array, "b k l c"]:
    return jax.image.resize(f.astype(jnp.float32), (f.shape[0], *size, f.shape[-1]), "bilinear")


def _at(f: Float[Array, "b h w c"], points: Float[Array, "b k 2"]) -> Float[Array, "b k c"]:
    """Features at rounded points, clamped to the image."""
    limit = jnp.asarray([f.shape[2] - 1, f.shape[1] - 1])
    place = jnp.clip(jnp.round(points).astype(int), 0, limit)
    return jax.vmap(lambda image, where: image[where[:, 1], where[:, 0]])(f, place)


def _unit(f: Array) -> Array:
    return f * jax.lax.rsqrt(jnp.square(f).sum(-1, keepdims=True) + 1e-12)


@partial(jax.jit, static_argnames="size")
def match(
    source: Float[Array, "b h w c"], target: Float[Array, "b p q c"], points: Float[Array, "b k 2"], size: Size
) -> Float[Array, "b k 2"]:
    """For each point of the source image the most similar pixel of the target image."""
    query = _unit(_at(_resize(source, size), points))
    similar = jnp.einsum("bkc,byxc->bkyx", query, _unit(_resize(target, size)))
    best = similar.reshape(*similar.shape[:2], -1).argmax(-1)
    return jnp.stack([best % size[1], best // size[1]], -1).astype(jnp.float32)


def pck(
    found: ArrayLike, truth: ArrayLike, extent: ArrayLike, alpha: float = 0.1, visible: ArrayLike | None = None
) -> float:
    """The fraction of points [b k 2] found within alpha * extent, over all visible keypoints of all pairs.

    extent: max(height, width) of the target images, one number, or [b], such as `box_extent(boxes)`.
    """
    distance = np.linalg.norm(np.asarray(found, np.float64) - np.asarray(truth, np.float64), axis=-1)
    hits = distance <= alpha * np.broadcast_to(np.asarray(extent, np.float64).reshape(-1, 1), distance.shape)
    visible = np.ones(hits.shape, bool) if visible is None else np.asarray(visible, bool)
    if not visible.any():
        raise ValueError("PCK is undefined without visible keypoints; pass pairs that share one")
    return float(hits[visible].mean())


def box_extent(boxes: ArrayLike) -> np.ndarray:
    """max(width, height) of boxes [b 4] (left, top, right, bottom)."""
    left, top, right, bottom = np.moveaxis(np.asarray(boxes, np.float64), -1, 0)
    return np.maximum(right - left, bottom - top)


# ------------------------------------------------------------------------------------------ a trained layer


class Aggregation(nn.Module):
    """One 3x3 convolution without bias; initialised as a rotation (or projection), which preserves cosines."""

    features: int

    @nn.compact
    def __call__(self, f: Float[Array, "b h w c"]) -> Float[Array, "b h w d"]:
        def start(key: Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> Array:
            return jnp.zeros(shape, dtype).at[1, 1].set(nn.initializers.orthogonal()(key, shape[2:], dtype))

        return nn.Conv(self.features, (3, 3), use_bias=False, kernel_init=start, name="conv")(f)


def contrast(
    a: Float[Array, "b h w c"],
    b: Float[Array, "b h w c"],
    points: tuple[Array, Array] | Array,
    temperature: float,
    visible: Bool[Array, "b k"] | None = None,
) -> Array:
    """Mean cross-entropy of finding points[0] of a at points[1] of b, and back, over the visible points."""

    def one_way(source: Array, target: Array, start: Array, end: Array) -> Array:
        logits = jnp.einsum("bkc,byxc->bkyx", _at(source, start), target) / temperature
        height, width = target.shape[1:3]
        place = jnp.clip(jnp.round(end).astype(int), 0, jnp.asarray([width - 1, height - 1]))
        labels = place[..., 1] * width + place[..., 0]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits.reshape(*labels.shape, -1), labels)
        seen = jnp.ones(labels.shape) if visible is None else visible.astype(jnp.float32)
        return (seen * losses).sum() / jnp.maximum(seen.sum(), 1)

    a, b = _unit(a), _unit(b)
    return (one_way(a, b, *points) + one_way(b, a, *points[::-1])) / 2


def fit_aggregation(
    source: ArrayLike,
    target: ArrayLike,
    points: tuple[ArrayLike, ArrayLike],
    visible: ArrayLike | None = None,
    *,
    width: int = 0,
    steps: int = 200,
    batch: int = 8,
    rate: float = 5e-4,
    decay: float = 0.01,
    temperature: float = 0.07,
    seed: int = 0,
) -> tuple[Aggregation, Params, list[float]]:
    """The layer, its parameters and the losses, trained on pairs of features [n h w c] and points [n k 2] on that grid.

    `visible` [n k] marks points visible in both images; None: all. `width` 0 keeps the number of channels. Apply it as
    `head.apply({"params": params}, features)`, then `match`.
    """
    source, target = np.asarray(source, np.float32), np.asarray(target, np.float32)
    head = Aggregation(width or source.shape[-1])
    params = jax.jit(head.init)(jax.random.key(seed), jnp.asarray(source[:1]))["params"]

    def loss(params: Params, pairs: Mapping[str, Array]) -> Array:
        a, b = (jnp.asarray(head.apply({"params": params}, pairs[side])) for side in ("source", "target"))
        return contrast(a, b, (pairs["start"], pairs["end"]), temperature, pairs["visible"])

    ends = {name: np.asarray(side, np.float32) for name, side in zip(("start", "end"), points, strict=True)}
    seen = np.ones(ends["start"].shape[:2], bool) if visible is None else np.asarray(visible, bool)
    data = {"source": source, "target": target, **ends, "visible": seen}
    params, losses = fit(loss, params, data, steps=steps, batch=batch, rate=rate, decay=decay, seed=seed)
    return head, params, losses
