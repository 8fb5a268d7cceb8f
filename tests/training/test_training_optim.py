"""Learning rates by images seen, clipping, and the optimizers by name."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from paths import GOLDEN

from jaxdiff.training import optim

BATCH = 50


def rates(counts, **options):
    rate = optim.schedule(2.0, BATCH, **options)
    return np.asarray(jax.vmap(rate)(jnp.asarray(list(counts))))


def test_warm_up_is_linear_in_images_and_starts_above_zero():
    np.testing.assert_allclose(rates(range(6), warmup_images=200), [0.5, 1.0, 1.5, 2.0, 2.0, 2.0])
    np.testing.assert_allclose(rates([0, 100]), [2.0, 2.0])


@pytest.mark.parametrize(
    ("decay", "wanted"),
    [
        ("constant", [2, 2, 2, 2, 2]),
        ("cosine", [2, 1 + np.cos(np.pi / 4), 1, 0, 0]),
        ("linear", [2, 1.5, 1, 0, 0]),
        ("sqrt", [2, 2, 2, 2, 2 / np.sqrt(3)]),
        ("step", [2, 2, 2, 0.2, 0.2]),
    ],
)
def test_decays_count_images(decay, wanted):
    """At 0, a quarter, a half, all and three times `decay_images`."""
    np.testing.assert_allclose(rates([0, 5, 10, 20, 60], decay=decay, decay_images=20 * BATCH), wanted, atol=1e-6)


def test_a_larger_batch_passes_through_the_schedule_faster():
    slow, fast = (optim.schedule(1.0, b, decay="linear", decay_images=1000) for b in (10, 20))
    np.testing.assert_allclose(
        [float(slow(jnp.int32(2 * i))) for i in range(9)], [float(fast(jnp.int32(i))) for i in range(9)]
    )


def test_warm_up_and_decay_multiply():
    np.testing.assert_allclose(
        rates([0, 1, 9], warmup_images=200, decay="linear", decay_images=20 * BATCH), [0.5, 0.95, 1.1], rtol=1e-6
    )


@pytest.mark.parametrize("name", optim.OPTIMIZERS)
def test_every_optimizer_descends_a_parabola(name):
    # the schedule has a count in the state, and the rate of the first step is that of count 0
    optimizer = optim.make(name, 0.05, BATCH, clip=10.0, warmup_images=2 * BATCH)
    params = {"a": jnp.array([3.0, -2.0]), "b": jnp.ones((2, 2))}
    loss = lambda p: sum(jnp.sum(x**2) for x in jax.tree.leaves(p))  # noqa: E731
    state = optimizer.init(params)

    @jax.jit
    def step(params, state):
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(jax.grad(loss)(params), state, params)
            return optax.apply_updates(params, updates), state

    begun = loss(params)
    for _ in range(20):
        params, state = step(params, state)
    assert loss(params) < 0.9 * begun


def test_clipping_is_by_the_norm_of_all_gradients():
    params = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    gradients = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}
    for clip, factor in ((1.0, 0.2), (10.0, 1.0), (0.0, 1.0)):
        optimizer = optim.make("sgd", 1.0, BATCH, clip=clip)
        updates, _ = optimizer.update(gradients, optimizer.init(params), params)
        np.testing.assert_allclose([updates["a"][0], updates["b"][0]], [-3 * factor, -4 * factor], rtol=1e-6)


def test_options_reach_the_optimizer():
    params, gradients = {"a": jnp.ones(1)}, {"a": jnp.zeros(1)}
    optimizer = optim.make("adamw", 0.1, BATCH, options={"weight_decay": 0.5})
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    np.testing.assert_allclose(updates["a"], -0.05, rtol=1e-6)


def test_the_inverse_square_root_schedule_is_the_published_one():
    with np.load(GOLDEN / "phema.npz") as z:
        decay = {"warmup_images": 10e6, "decay": "sqrt", "decay_images": 70_000 * 2048}
        found = optim.learning_rate(z["lr_nimg"], 0.012, **decay)
        np.testing.assert_allclose(found, z["lr"], rtol=1e-9)
        trained = [float(optim.schedule(0.012, 2048, **decay)(images / 2048)) for images in z["lr_nimg"][1:]]
        np.testing.assert_allclose(trained, z["lr"][1:], rtol=2048 / 1e6 * 1.01)  # a batch later at most
