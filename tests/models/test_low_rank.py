"""Low-rank updates of kernels: the boxes that networks open, how adapters start, what they are merged to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.traverse_util import flatten_dict

from jaxdiff.models import DiT, low_rank

CHANNELS, HEADS = 3, 2
# path: shape, rows and columns of its matrix
SHAPES = {
    "conv/kernel": ((3, 3, 3, 8), 27, 8),
    "wide/kernel": ((8, 12), 8, 12),
    "heads/kernel": ((12, 2, 2, 4), 12, 16),
    "out/kernel": ((2, 4, 5), 8, 5),
}


class Layers(nn.Module):
    """A layer of every kind."""

    @nn.compact
    def __call__(self, x):
        h = nn.tanh(nn.Conv(8, (3, 3), name="conv")(x))
        h = nn.tanh(nn.Dense(12, name="wide")(h))
        h = nn.DenseGeneral((2, HEADS, 4), name="heads")(h)
        return nn.DenseGeneral(5, axis=(-2, -1), name="out")(jnp.tanh(h[..., 0, :, :]))


def network():
    """(init, apply) of these layers."""
    x = jax.random.normal(jax.random.key(0), (2, 4, 4, CHANNELS))
    return lambda: Layers().init(jax.random.key(1), x)["params"], lambda params: Layers().apply({"params": params}, x)


def dit():
    """(init, apply) of a DiT whose blocks are scanned and rematerialised."""
    model = DiT(channels=1, depth=2, width=8, heads=2, num_classes=0, learn_variance=False, scan=True, remat="full")
    x = jax.random.normal(jax.random.key(0), (2, 4, 4, 1))

    def init():
        params = model.init(jax.random.key(1), x, jnp.ones(2))["params"]
        return jax.tree.map(lambda a: a + 0.2 * jax.random.normal(jax.random.key(2), a.shape), params)

    return init, lambda params: model.apply({"params": params}, x, jnp.ones(2))


def moved(adapters, size=0.3):
    return jax.tree.map(lambda a: a + size * jax.random.normal(jax.random.key(3), a.shape), adapters)


@pytest.mark.parametrize("make", [network, dit])
def test_boxes_are_merged_kernels_in_values_and_gradients(make):
    init, apply = make()
    base = jax.jit(lambda: init())()
    begun = low_rank.Base(base, rank=2, scale=0.7).start(jax.random.key(4), init)
    np.testing.assert_array_equal(apply(low_rank.combined(base, begun)), apply(base))  # starts as the base
    adapters = moved(begun)

    @jax.jit
    def both(adapters):
        boxes = jax.value_and_grad(lambda a: jnp.sin(apply(low_rank.combined(base, a))).sum())
        whole = jax.value_and_grad(lambda a: jnp.sin(apply(low_rank.merged(base, a))).sum())
        return boxes(adapters), whole(adapters)

    found, wanted = both(adapters)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert abs(float(found[0]) - float(jnp.sin(apply(base)).sum())) > 1e-2


def test_kernels_are_merged_as_matrices():
    init, _ = network()
    base = jax.jit(lambda: init())()
    adapters = moved(low_rank.Base(base, rank=6, scale=0.5).start(jax.random.key(4), init))
    merged, low = flatten_dict(low_rank.merged(base, adapters), sep="/"), flatten_dict(adapters.low, sep="/")
    assert set(low) == set(SHAPES)
    for name, kernel in flatten_dict(base, sep="/").items():
        if name not in low:
            np.testing.assert_array_equal(merged[name], kernel)
            continue
        shape, rows, columns = SHAPES[name]
        rank = min(6, rows, columns)
        a, b = np.asarray(low[name].a).reshape(rows, rank), np.asarray(low[name].b).reshape(rank, columns)
        assert kernel.shape == shape
        np.testing.assert_allclose(merged[name], kernel + 0.5 * (a @ b).reshape(shape), atol=1e-6)


@pytest.mark.parametrize("make", [network, dit])
def test_at_full_rank_a_step_of_descent_is_that_of_the_kernels(make):
    init, apply = make()
    base = jax.jit(lambda: init())()
    loss = lambda params: jnp.square(apply(params) - 1).sum()  # noqa: E731
    adapters = low_rank.Base(base, rank=1000).start(jax.random.key(4), init)
    full, low = jax.jit(
        lambda a: (jax.grad(loss)(base), jax.grad(lambda a: loss(low_rank.combined(base, a)))(a)),
    )(adapters)
    after = low_rank.merged(base, jax.tree.map(lambda a, g: a - 0.01 * g, adapters, low))
    wanted, found = flatten_dict(jax.tree.map(lambda p, g: p - 0.01 * g, base, full)), flatten_dict(after)
    kernels = [path for path in wanted if path[-1] == "kernel"]
    for path in kernels:
        np.testing.assert_allclose(found[path], wanted[path], atol=2e-5)
    assert max(np.abs(wanted[path] - flatten_dict(base)[path]).max() for path in kernels) > 1e-2


def test_targets_choose_kernels_and_new_parameters_are_trained_themselves():
    init, _ = network()
    base = jax.jit(lambda: init())()
    older = {name: value for name, value in base.items() if name != "out"}  # a base without the last layer
    adapters = low_rank.Base(older, rank=2, targets="^(conv|heads)/").start(jax.random.key(4), init)
    assert set(adapters.low) == {"conv", "heads"}
    jax.tree.map(np.testing.assert_array_equal, adapters.full, {"out": base["out"]})
    assert jax.tree.structure(low_rank.merged(older, adapters)) == jax.tree.structure(base)
    with pytest.raises(ValueError, match="matches none of the network's 4 kernels"):
        low_rank.Base(base, rank=2, targets="attention").start(jax.random.key(4), init)
