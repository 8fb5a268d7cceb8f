"""What every training algorithm is: a tuple of pure functions, like an optax transformation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxdiff.denoisers import COND_KEYS, Denoiser
from jaxdiff.trees import by_name, misfits, path_name

Batch = Mapping[str, Any]
Metrics = dict[str, Array]


class Method(NamedTuple):
    """init(key, batch) -> state; step(state, batch, key) -> (state, metrics); sample(state, noise, cond, key) -> x0.

    Distillation's init takes a third argument, {"teacher": parameters, ...}, which its state holds and never trains.
    `denoiser(state)` is the network as a denoiser; `export(state)` keeps of the state only what sampling needs, and
    sampling works on the result. `averages` tells whether that is an average of the parameters; `correct(state, noise,
    cond, key, ...)` is a generator's samples before and after a correction by the teacher, where there is one. A state
    is one pytree: everything that must survive a restart.
    """

    init: Callable[..., Any]
    step: Callable[[Any, Batch, Array], tuple[Any, Metrics]]
    sample: Callable[..., Array]
    denoiser: Callable[[Any], Denoiser]
    export: Callable[[Any], Any]
    averages: bool = True
    correct: Callable[..., tuple[Array, Array]] | None = None


def data_of(batch: Batch) -> Array:
    """The clean examples of a batch: `image`, or `latent` when there is one."""
    return jnp.asarray(batch["latent"] if "latent" in batch else batch["image"])


def cond_of(batch: Batch) -> dict[str, Any] | None:
    """The condition of a batch: those of its entries that a denoiser takes."""
    return {key: batch[key] for key in COND_KEYS if key in batch} or None


def draw_labels(key: Array, cond: Any, model: Any, examples: int, place: Callable[[Array], Array] = lambda x: x) -> Any:
    """The batch's conditions, labels replaced by uniform draws."""
    if not getattr(model, "num_classes", 0):
        return cond
    return {**(cond or {}), "label": place(jax.random.randint(key, (examples,), 0, model.num_classes))}


def accumulate(
    gradient: Callable[[Any, Any, Any], tuple[Any, Any]], params: Any, examples: Any, parts: int
) -> tuple[Any, Any]:
    """`gradient(params, examples, i) -> (means, outputs)` over slices i of the batch: averaged, put together.

    Slice i holds examples i, i + parts, ...: each device keeps its own. On CPU the loop is unrolled, because
    XLA is slow at convolution gradients inside a loop there.
    """
    if parts == 1:
        return gradient(params, examples, 0)
    sizes = {leaf.shape[0] for leaf in jax.tree.leaves(examples)}
    if any(size % parts for size in sizes):
        raise ValueError(f"a batch of {max(sizes)} cannot be accumulated in {parts} equal parts; change one of them")
    slices = jax.tree.map(lambda a: a.reshape(-1, parts, *a.shape[1:]).swapaxes(0, 1), examples)

    def add(total: Any, inputs: Any) -> tuple[Any, Any]:
        means, outputs = gradient(params, inputs[1], inputs[0])
        return jax.tree.map(jnp.add, total, means), outputs

    shapes, _ = jax.eval_shape(lambda: gradient(params, jax.tree.map(lambda a: a[0], slices), 0))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    loop = partial(jax.lax.scan, add)
    total, outputs = jax.lax.platform_dependent(
        zeros, (jnp.arange(parts), slices), cpu=partial(loop, unroll=parts), default=loop
    )
    whole = jax.tree.map(lambda a: a.swapaxes(0, 1).reshape(-1, *a.shape[2:]), outputs)
    return jax.tree.map(lambda a: a / parts, total), whole


def pseudo_huber(a: Array, b: Array, c: float = 0.00054) -> Array:
    """sqrt(|a - b|^2 + c^2 dim) - c sqrt(dim) of each example: |a - b| far off, smooth at zero."""
    squares = jnp.square(a - b).reshape(a.shape[0], -1)
    offset = c * squares.shape[1] ** 0.5
    return jnp.sqrt(squares.sum(1) + offset**2) - offset


def update(
    optimizer: optax.GradientTransformation, gradients: Any, opt_state: Any, params: Any, factor: Any = 1.0
) -> tuple[Any, Any]:
    """One optimizer step, its length times `factor`: (params, opt_state). optax counts on implicit dtype promotion."""
    with jax.numpy_dtype_promotion("standard"):
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        if not (isinstance(factor, float) and factor == 1.0):
            updates = jax.tree.map(lambda u: u * factor, updates)
        return optax.apply_updates(params, updates), opt_state


def adopt(fresh: Any, given: Any) -> Any:
    """`fresh` parameters with those of `given`, which may name fewer; none that are unknown or of another shape."""
    have = by_name(given)
    wrong = misfits(have, by_name(fresh), partial=True)
    if wrong:
        raise ValueError(f"the teacher does not fit the student: {wrong}")

    def choose(path: Any, leaf: Any) -> Any:
        return jnp.array(have.get(path_name(path), leaf), leaf.dtype)

    return jax.tree_util.tree_map_with_path(choose, fresh)


def in_loops(model: Any) -> Any:
    """The model with gradients that are fast inside loops, where it offers them."""
    return model.clone(loop=True) if hasattr(model, "loop") else model
