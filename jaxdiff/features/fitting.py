"""The training loop of the small heads: AdamW on random batches of arrays in memory."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from jaxdiff.methods.method import update
from jaxdiff.trees import Params, Tree


def fit(
    loss: Callable[[Params, Tree], Array],
    params: Params,
    data: Tree,
    *,
    steps: int,
    batch: int,
    rate: float,
    decay: float,
    seed: int,
) -> tuple[Params, list[float]]:
    """Parameters after `steps` steps on `loss(params, batch)`, and the losses; `data` is a pytree of arrays [n ...].

    The loop is in Python: XLA on CPU is slow at convolution gradients inside loops.
    """
    optimizer = optax.adamw(rate, weight_decay=decay)

    @jax.jit
    def step(params: Params, state: Tree, some: Tree) -> tuple[Params, Tree, Array]:
        value, slope = jax.value_and_grad(loss)(params, some)
        return *update(optimizer, slope, state, params), value

    count = len(jax.tree.leaves(data)[0])
    state, losses, rng = optimizer.init(params), [], np.random.default_rng(seed)
    for _ in range(steps):
        rows = rng.choice(count, min(batch, count), replace=False)
        params, state, value = step(params, state, jax.tree.map(lambda a, rows=rows: jnp.asarray(a[rows]), data))
        losses.append(float(value))
    return params, losses
