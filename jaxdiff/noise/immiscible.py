"""Immiscible diffusion: noise assigned to the nearest images of a batch (Li et al. 2024, 2025).

    pi = argmin over permutations of sum_i c(x_i, eps_pi(i)),    x_i is then diffused with eps_pi(i)

Only the coupling changes: the noise vectors are permuted, so their marginal stays N(0, I). Squared L2 distance has
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

from jaxdiff.conditions import Cond
from jaxdiff.errors import check_images, choose
from jaxdiff.noise.assignment import first, linear_assignment
from jaxdiff.placement import batch_sharding


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
    "rotated": _rotated,  # control: assigned by a fixed permutation of the noise's entries, so not nearer
    "farthest": lambda x, e: -_dot(x, e),
}
ASSIGNMENTS = (*COSTS, "knn", "none")
ALONE = ("none", "knn")  # per image


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
    """The noise `eps` assigned to the images of its batch by `kind`: row i is the noise of image i.

    "knn" takes the nearest of k noise vectors per image, its own and k - 1 drawn from the key; without a key, the
    nearest in the batch. Unlike a permutation this shrinks the noise (Li et al. 2025):
    E|eps|^2/d = 1 - 2 g / sqrt(d (2 + 4 s^2)), with g the mean largest of k normals, s the RMS of x0.

    Args:
        x0: images [b ...].
        eps: noise of the same shape.
        kind: "hungarian", "hungarian_l2", "hungarian_l1", "knn", "rotated", "farthest" or "none".
        exact: solve exactly, or to within a small bound.
        half: the cost as published, in half precision.
        labels: noise is only exchanged within a class, so that each class sees the whole Gaussian.
        groups: parts of the batch solved separately; as many as devices gives one assignment per device.
        sharding: of the batch over devices: each has all the noise, computes its rows of the cost and, after one
            all-gather, solves the same problem. With one or more groups per device nothing is communicated.
        key: for "knn".
        k: for "knn".
        limit: the largest problem that is solved.

    Returns:
        Noise of x0's shape.
    """
    choose(kind, ASSIGNMENTS, "noise assignment")
    check_images("x0, the images,", x0)
    check_images("eps, the noise,", eps)
    if x0.shape != eps.shape or not x0.ndim:
        raise ValueError(f"assign needs x0 and eps of one shape [b, ...], got {x0.shape} and {eps.shape}")
    if labels is not None and labels.shape != x0.shape[:1]:
        raise ValueError(f"assign got labels of shape {labels.shape} for {len(x0)} images; give one label per image")
    alone = kind == "none" or (kind == "knn" and key is not None)  # per image
    _check(len(x0), groups, 1 if sharding is None else _shards(sharding), k, 0 if alone else limit)
    if kind == "none":
        return eps
    x0 = lax.stop_gradient(x0)
    if kind == "knn" and key is not None:
        return _nearest_of(x0, eps, key, k)
    solve = partial(_choose, kind=kind, exact=exact, half=half)
    if sharding is None:
        return _in_groups(solve, groups, x0, eps, labels)
    rows, whole = PartitionSpec(sharding.spec[0]), PartitionSpec()
    if groups == 1:  # all the noise on every device: drawn there again rather than communicated
        run, rest = partial(solve, axes=sharding.spec[0]), whole
    else:
        run, rest = partial(_in_groups, solve, groups // _shards(sharding)), rows
    return jax.shard_map(run, mesh=sharding.mesh, in_specs=(rows, rest, rest), out_specs=rows)(x0, eps, labels)


Coupling = Callable[[Array, Array, Cond, Array], tuple[Array, dict[str, Array]]]  # (x0, eps, cond, key) -> eps, metrics


def coupling(
    kind: str = "hungarian",
    *,
    groups: int = 1,
    within_class: bool = False,
    exact: bool = True,
    half: bool = False,
    k: int = 4,
    limit: int = 4096,
) -> Coupling:
    """`assign` as methods use it, with metrics to log: images per assignment, distance reduction.

    `groups` = 0 solves once per device of the program's mesh; the others are arguments of `assign`.
    """
    choose(kind, ASSIGNMENTS, "noise assignment")
    alone = kind in ALONE
    options: dict[str, Any] = {"exact": exact, "half": half, "k": k, "limit": limit}

    def couple(x0: Array, eps: Array, cond: Cond, key: Array) -> tuple[Array, dict[str, Array]]:
        sharding = batch_sharding()
        devices = 1 if sharding is None else _shards(sharding)
        pieces = groups or devices
        sharding = sharding if devices > 1 else None
        labels = (cond or {}).get("label") if within_class else None
        if within_class and labels is None:
            raise ValueError("within_class needs labelled data; remove that option")
        assigned = assign(x0, eps, kind, groups=pieces, labels=labels, sharding=sharding, key=key, **options)
        solved = jnp.float32(1 if alone else len(x0) // pieces)
        return assigned, {"assignment_batch": solved, "distance_reduction": distance_reduction(x0, eps, assigned)}

    return couple


def check_coupling(
    kind: str, batch_size: int, devices: int, *, groups: int = 1, k: int = 4, limit: int = 4096, **_: object
) -> None:
    """Raise if `coupling` cannot assign such batches over `devices`."""
    _check(batch_size, groups or devices, devices, k, 0 if kind in ALONE else limit)


def distance_reduction(x0: Float[Array, "b ..."], eps: Float[Array, "b ..."], assigned: Float[Array, "b ..."]) -> Array:
    """The relative reduction in mean L2 distance from images to noise, `eps` to `assigned`; 0.02 for CIFAR-10.

    For an optimal permutation of n images it is about s g / (sqrt(d) (1 + s^2)), with s the RMS of x0 and g the
    mean largest of n normals (less for images that resemble each other).
    """

    return 1 - jnp.sqrt(_squares(x0, assigned)).mean() / jnp.sqrt(_squares(x0, eps)).mean()


def _squares(x0: Float[Array, "b ..."], eps: Float[Array, "b ..."]) -> Float[Array, " b"]:
    """Squared L2 distances between images and their noise."""
    return jnp.square((x0 - eps).astype(jnp.float32)).reshape(len(eps), -1).sum(1)


def _check(batch: int, groups: int, shards: int, k: int, limit: int) -> None:
    if groups < 1 or batch % groups:
        raise ValueError(f"assign got groups={groups} for a batch of {batch}; use a divisor of the batch size")
    if groups > 1 and groups % shards:
        raise ValueError(f"assign got groups={groups} on {shards} shards; use 1 or a multiple of the shards")
    if k < 1:
        raise ValueError(f"assign got k={k}; 'knn' needs k >= 1")
    if limit and batch // groups > limit:
        raise ValueError(
            f"assign got {batch // groups} images in one assignment, more than limit={limit} (a cost matrix of "
            f"{4 * (batch // groups) ** 2 / 2**20:.0f} MiB); raise groups to solve parts of the batch, use "
            "kind='knn' with a key, or raise the limit"
        )


def _shards(sharding: NamedSharding) -> int:
    axes = sharding.spec[0] if len(sharding.spec) else None
    names = (axes,) if isinstance(axes, str) else axes or ()
    return int(np.prod([sharding.mesh.shape[name] for name in names]))


def _choose(
    x0: Float[Array, "b ..."],
    eps: Float[Array, "n ..."],
    labels: Int[Array, " n"] | None,
    *,
    kind: str,
    exact: bool,
    half: bool,
    axes: str | tuple[str, ...] | None = None,
) -> Float[Array, "b ..."]:
    """The noise of the images; with mesh `axes`, of this device's images, whose costs it computes."""
    cost = _cost(x0, lax.stop_gradient(eps), "hungarian_l2" if kind == "knn" else kind, half)
    if axes is not None:
        cost = lax.all_gather(cost, axes, tiled=True)
    if labels is not None:
        cost = _within(cost, labels)
    index = first(cost == cost.min(1, keepdims=True)) if kind == "knn" else linear_assignment(cost, exact=exact)
    index = jnp.where(index < 0, jnp.arange(len(index), dtype=jnp.int32), index)  # not finite: unchanged
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
    if half:  # scaled by 0.1 to keep distances within float16
        x, e = ((0.1 * a.astype(jnp.float16)).astype(jnp.float32) for a in (x, e))
    cost = COSTS[kind](x, e)
    return cost.astype(jnp.float16).astype(jnp.float32) if half else cost


def _within(cost: Float[Array, "b b"], labels: Int[Array, " b"]) -> Float[Array, "b b"]:
    """The cost with pairs across classes more expensive than any within one. That suffices: opt(class without a row and
    a column) >= opt(class) - its most expensive pair, so each crossing costs more than it can save."""
    top, low = cost.max(), cost.min()
    more = jnp.where(top > low, top - low, 1 + jnp.abs(top))
    return jnp.where(labels == labels[:, None], cost, top + more)


def _nearest_of(x0: Float[Array, "b ..."], eps: Float[Array, "b ..."], key: Array, k: int) -> Float[Array, "b ..."]:
    """The nearest of each image's own noise and k - 1 more, drawn and compared one at a time."""

    def draw(best: tuple[Array, Array], key: Array) -> tuple[tuple[Array, Array], None]:
        e = jax.random.normal(key, eps.shape, eps.dtype)
        far = _squares(x0, e)
        nearer = (far < best[1]).reshape(-1, *[1] * (eps.ndim - 1))
        return (jnp.where(nearer, e, best[0]), jnp.minimum(far, best[1])), None

    if k == 1:
        return eps
    return lax.scan(draw, (eps, _squares(x0, eps)), jax.random.split(key, k - 1))[0][0]
