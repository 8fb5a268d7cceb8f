"""`keep`: the same bits in every mode, computed once in programs for CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdiff.models.keep import keep

VALUES = np.array([1.5, -2.0, 0.0, -0.0, np.inf, -np.inf, np.nan, 3e4], np.float32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32])
def test_values_keep_their_bits(dtype):
    x = jnp.asarray(np.array([3, -1, 0]) if dtype == jnp.int32 else VALUES, dtype)
    for found in (keep(x), jax.jit(keep)(x), jax.jit(jax.vmap(keep))(x)):
        assert found.dtype == dtype and np.asarray(found).tobytes() == np.asarray(x).tobytes()


def test_derivatives_are_those_of_the_identity():
    x = jnp.arange(3.0)
    value, tangent = jax.jit(lambda x: jax.jvp(lambda x: keep(x) ** 2, (x,), (x + 1,)))(x)
    np.testing.assert_array_equal(value, x**2)
    np.testing.assert_array_equal(tangent, 2 * x * (x + 1))
    np.testing.assert_array_equal(jax.jit(jax.grad(lambda x: (keep(x) ** 3).sum()))(x), 3 * x**2)
    np.testing.assert_array_equal(jax.jit(jax.hessian(lambda x: (keep(x) ** 2).sum()))(x), 2 * np.eye(3))


def readers(hold):
    """A cheap value with three readers."""

    def run(x):
        y = hold(jnp.abs(x))
        return y.sum(0), y.sum(1), (y - y.mean()) ** 2

    return jax.jit(run)


def test_a_kept_value_is_computed_once():
    x = jnp.ones((64, 48))
    counts = [readers(f).lower(x).compile().as_text().count(" abs(") for f in (keep, lambda x: x)]
    assert counts[0] == 1 < counts[1]


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_other_platforms_do_not_see_it(platform):
    text = readers(keep).trace(jnp.ones((4, 3))).lower(lowering_platforms=(platform,)).as_text()
    assert "bitcast_convert" not in text
    assert "bitcast_convert" in readers(keep).lower(jnp.ones((4, 3))).as_text()
