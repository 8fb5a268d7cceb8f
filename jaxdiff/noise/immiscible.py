"""Immiscible noise: images and noises of a batch paired by proximity (Li et al. 2024, 2025).

    pi = argmin over permutations of sum_i c(x_i, eps_pi(i)),    x_i is then diffused with eps_pi(i)

Only the coupling changes: the noises are the same multiset, so their marginal stays N(0, I). Squared L2 distance has
the argmin of c_ij = -<x_i, eps_j>, as |x_i|^2 and |eps_j|^2 are constants of rows and columns: one matrix product.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxdiff.errors import pick
from jaxdiff.noise.assignment import first, linear_assignment


def _dot(x: Float[Array, "b d"], e: Float[Array, "n d"]) -> Float[Array, "b n"]:
    return -jnp.einsum("bd,nd->bn", x, e, preferred_element_type=jnp.float32)


def _l2(x: Float[Array, "b d"], e: Float[Array, "n d"]) -> Float[Array, "b n"]:
    squares = jnp.square(x).sum(1)[:, None] + jnp.square(e).sum(1)
    return jnp.sqrt(jnp.maximum(squares + 2 * _dot(x, e), 0))


def _l1(x: Float[Array, "b d"], e: Float[Array, "n d"]) -> Float[Array, "b n"]:
    return lax.map(lambda row: jnp.abs(row - e).sum(1), x)  # row by row: all at once would take b n d floats


def _rotated(x: Float[Array, "b d"], e: Float[Array, "n d"]) -> Float[Array, "b n"]:
    return _dot(x, e[:, np.random.default_rng(0).permutation(e.shape[1])])


COSTS: dict[str, Callable[[Array, Array], Array]] = {
    "hungarian": _dot,  # squared L2
    "hungarian_l2": _l2,  # as published
    "hungarian_l1": _l1,
    "rotated": _rotated,  # as sharp a pairing, but not nearer: the noise seen through a fixed shuffle of its entries
    "farthest": lambda x, e: -_dot(x, e),
}
KINDS = (*COSTS, "knn", "none")


def assign(
    x0: Float[Array, ...],
    eps: Float[Array, ...],
    kind: str = "hungarian",
    *,
    exact: bool = True,
    half: bool = False,
    labels: Int[Array, ...] | None = None,
    groups: int = 1,
    sharding: NamedSharding | None = None,
    key: Array | None = None,
    k: int = 4,
    limit: int = 4096,
) -> Float[Array, ...]:
    """The noises `eps`, each given to the image it is to be diffused with: permuted within the batch by `kind`.

    half      the cost as published, in half precision
    labels    noises stay within a class, so that each class sees its own share of the Gaussian
    groups    pieces of the batch solved apart; as many as devices makes it an assignment per device
    sharding  of the batch over devices: each draws the whole noise, computes its rows of the cost and, after the only
              all-gather, solves the same problem. With a group or more per device nothing is exchanged
    key, k    "knn" takes the nearest of k noises of each image, its own and k - 1 drawn from the key; without a key,
              the nearest of the batch's. Unlike a permutation this shrinks the noise (Li et al. 2025):
              E|eps|^2/d = 1 - 2 g / sqrt(d (2 + 4 s^2)), with g the mean largest of k normals, s the RMS of x0
    """
    pick(dict.fromkeys(KINDS), kind, "noise assignment")
    if x0.shape != eps.shape or not x0.ndim:
        raise ValueError(f"assign needs x0 and eps of one shape [b, ...], got {x0.shape} and {eps.shape}")
    if labels is not None and labels.shape != x0.shape[:1]:
        raise ValueError(f"assign got labels of shape {labels.shape} for {len(x0)} images; give one label per image")
    alone = kind == "none" or (kind == "knn" and key is not None)  # each image by itself
    _check(len(x0), groups, 1 if sharding is None else _shards(sharding), k, 0 if alone else limit)
    if kind == "none":
        return eps
    x0 = lax.stop_gradient(x0)
    if kind == "knn" and key is not None:
        return _nearest_of(x0, eps, key, k)
    choose = partial(_choose, kind=kind, exact=exact, half=half)
    if sharding is None:
        return _in_groups(choose, groups, x0, eps, labels)
    rows, whole = PartitionSpec(sharding.spec[0]), PartitionSpec()
    if groups == 1:  # the noise whole on every device: a draw is then repeated there, not sent
        run, rest = partial(choose, axes=sharding.spec[0]), whole
    else:
        run, rest = partial(_in_groups, choose, groups // _shards(sharding)), rows
    return jax.shard_map(run, mesh=sharding.mesh, in_specs=(rows, rest, rest), out_specs=rows)(x0, eps, labels)


Coupling = Callable[[Array, Array, Any, Array], tuple[Array, dict[str, Array]]]  # (x0, eps, cond, key) -> eps, metrics


def coupling(
    kind: str = "hungarian",
    *,
    groups: int = 1,
    within_class: bool = False,
    exact: bool = True,
    half: bool = False,
    k: int = 4,
    limit: int = 4096,
    sharding: NamedSharding | None = None,
    batch_size: int = 0,
) -> Coupling:
    """`assign` as a method takes it, with what a log should tell: images solved at once, distance reduction.

    `groups` = 0 solves once per device of `sharding`; given `batch_size`, what cannot be assigned is refused here, not
    in the first step; the others are arguments of `assign`.
    """
    pick(dict.fromkeys(KINDS), kind, "noise assignment")
    devices = 1 if sharding is None else _shards(sharding)
    groups = groups or devices
    sharding = sharding if devices > 1 else None
    alone = kind in ("none", "knn")  # each image by itself
    if batch_size:
        _check(batch_size, groups, devices, k, 0 if alone else limit)
    options: dict[str, Any] = {"exact": exact, "half": half, "k": k, "limit": limit}

    def couple(x0: Array, eps: Array, cond: Any, key: Array) -> tuple[Array, dict[str, Array]]:
        labels = (cond or {}).get("label") if within_class else None
        if within_class and labels is None:
            raise ValueError("noise assigned within_class needs labelled data; leave that option out")
        assigned = assign(x0, eps, kind, groups=groups, labels=labels, sharding=sharding, key=key, **options)
        solved = jnp.float32(1 if alone else len(x0) // groups)
        return assigned, {"assignment_batch": solved, "distance_reduction": distance_reduction(x0, eps, assigned)}

    return couple


def distance_reduction(x0: Float[Array, "b ..."], eps: Float[Array, "b ..."], assigned: Float[Array, "b ..."]) -> Array:
    """By what share `assigned` is nearer to the images than `eps`, in mean L2 distance; 0.02 at CIFAR-10's size.

    For a permutation by nearness over n images it is about s g / (sqrt(d) (1 + s^2)), with s the RMS of x0 and g the
    mean largest of n normals (less for images that resemble each other).
    """

    return 1 - jnp.sqrt(_squares(x0, assigned)).mean() / jnp.sqrt(_squares(x0, eps)).mean()


def _squares(x0: Float[Array, "b ..."], eps: Float[Array, "b ..."]) -> Float[Array, " b"]:
    """Squared L2 distances of images and their noises."""
    return jnp.square((x0 - eps).astype(jnp.float32)).reshape(len(eps), -1).sum(1)


def _check(batch: int, groups: int, shards: int, k: int, limit: int) -> None:
    if groups < 1 or batch % groups:
        raise ValueError(f"assign got groups={groups} for a batch of {batch}; take a divisor of the batch")
    if groups > 1 and groups % shards:
        raise ValueError(f"assign got groups={groups} on {shards} shards; take 1 or a multiple of the shards")
    if k < 1:
        raise ValueError(f"assign got k={k}; 'knn' needs at least one noise per image")
    if limit and batch // groups > limit:
        raise ValueError(
            f"assign got {batch // groups} images to solve at once, more than limit={limit} (a cost matrix of "
            f"{4 * (batch // groups) ** 2 / 2**20:.0f} MiB); raise groups to solve pieces of the batch apart, take "
            "kind='knn' with a key, or raise the limit"
        )


def _shards(sharding: NamedSharding) -> int:
    names = sharding.spec[0] if len(sharding.spec) else None
    return int(np.prod([sharding.mesh.shape[name] for name in ((names,) if isinstance(names, str) else names or ())]))


def _choose(
    x0: Float[Array, "b ..."],
    eps: Float[Array, "n ..."],
    labels: Int[Array, " n"] | None,
    *,
    kind: str,
    exact: bool,
    half: bool,
    axes: Any = None,
) -> Float[Array, "b ..."]:
    """The noises of the images; with the `axes` of a mesh, those of this device's images, who computes their costs."""
    cost = _cost(x0, lax.stop_gradient(eps), "hungarian_l2" if kind == "knn" else kind, half)
    cost = cost if axes is None else lax.all_gather(cost, axes, tiled=True)
    cost = cost if labels is None else _within(cost, labels)
    index = first(cost == cost.min(1, keepdims=True)) if kind == "knn" else linear_assignment(cost, exact=exact)
    index = jnp.where(index < 0, jnp.arange(len(index), dtype=jnp.int32), index)  # not finite: left as they are
    if axes is not None:
        index = lax.dynamic_slice_in_dim(index, lax.axis_index(axes) * len(x0), len(x0))
    return eps[index]


def _in_groups(choose: Callable[..., Array], groups: int, x0: Array, eps: Array, labels: Array | None) -> Array:
    if groups == 1:
        return choose(x0, eps, labels)
    pieces = jax.tree.map(lambda a: a.reshape(groups, -1, *a.shape[1:]), (x0, eps, labels))
    return lax.map(lambda piece: choose(*piece), pieces).reshape(eps.shape)


def _cost(x0: Array, eps: Array, kind: str, half: bool) -> Float[Array, "b n"]:
    x, e = (a.reshape(len(a), -1).astype(jnp.float32) for a in (x0, eps))
    if half:  # a tenth keeps the distance below the largest half
        x, e = ((0.1 * a.astype(jnp.float16)).astype(jnp.float32) for a in (x, e))
    cost = COSTS[kind](x, e)
    return cost.astype(jnp.float16).astype(jnp.float32) if half else cost


def _within(cost: Float[Array, "b b"], labels: Int[Array, " b"]) -> Float[Array, "b b"]:
    """The cost with pairs across classes dearer than any within, which is enough: opt(class less a row and a column)
    is at least opt(class) less the dearest pair, so that each crossing costs more than it can save."""
    top, low = cost.max(), cost.min()
    more = jnp.where(top > low, top - low, 1 + jnp.abs(top))
    return jnp.where(labels == labels[:, None], cost, top + more)


def _nearest_of(x0: Float[Array, "b ..."], eps: Float[Array, "b ..."], key: Array, k: int) -> Float[Array, "b ..."]:
    """The nearest of each image's own noise and k - 1 drawn ones, which are drawn and compared one at a time."""

    def draw(best: tuple[Array, Array], key: Array) -> tuple[tuple[Array, Array], None]:
        e = jax.random.normal(key, eps.shape, eps.dtype)
        far = _squares(x0, e)
        nearer = (far < best[1]).reshape(-1, *[1] * (eps.ndim - 1))
        return (jnp.where(nearer, e, best[0]), jnp.minimum(far, best[1])), None

    return lax.scan(draw, (eps, _squares(x0, eps)), jax.random.split(key, k - 1))[0][0] if k > 1 else eps
