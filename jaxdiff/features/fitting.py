"""The training loop of the small heads: AdamW on random batches of arrays in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from jaxdiff.methods.method import update


def fit(
    loss: Callable[[Any, Any], Array],
    params: Any,
    data: Any,
    *,
    steps: int,
    batch: int,
    rate: float,
    decay: float,
    seed: int,
) -> tuple[Any, list[float]]:
    """Parameters after `steps` steps on `loss(params, batch)`, and the losses; `data` is a pytree of arrays [n ...].

    The loop is Python's: XLA on CPU is slow at convolution gradients inside its own.
    """
    optimizer = optax.adamw(rate, weight_decay=decay)

    @jax.jit
    def step(params: Any, state: Any, some: Any) -> tuple[Any, Any, Array]:
        value, slope = jax.value_and_grad(loss)(params, some)
        return *update(optimizer, slope, state, params), value

    count = len(jax.tree.leaves(data)[0])
    state, losses, rng = optimizer.init(params), [], np.random.default_rng(seed)
    for _ in range(steps):
        rows = rng.choice(count, min(batch, count), replace=False)
        params, state, value = step(params, state, jax.tree.map(lambda a, rows=rows: jnp.asarray(a[rows]), data))
        losses.append(float(value))
    return params, losses
