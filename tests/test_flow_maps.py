"""Flow maps against the closed form of Gaussian data, in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxdiff import denoisers, flow_maps

MEAN, STD = 0.3, 0.5
EXACT = flow_maps.gaussian(MEAN, STD)
DENOISE = denoisers.gaussian(MEAN, STD)
pytestmark = pytest.mark.usefixtures("x64")


def points(n=7):
    x = jnp.linspace(-3.0, 4.0, n)[:, None] * jnp.array([1.0, -0.4])
    return x, jnp.geomspace(0.05, 60.0, n), jnp.linspace(0.01, 0.9, n) * jnp.geomspace(0.05, 60.0, n)


def test_the_published_numbers():
    x = jnp.array([[1.3]])
    np.testing.assert_allclose(flow_maps.jump(EXACT, x, 2.0, 0.5)[0, 0], 0.6429972, atol=1e-7)
    np.testing.assert_allclose(EXACT(x, 2.0, 0.5)[0, 0], 0.4239962, atol=1e-7)


def test_a_jump_is_the_solution_of_the_ode():
    """Along dx/dsigma = (x - D)/sigma, against X = m + rho (x - m), and against ten thousand small steps."""
    x, sigma, tau = points()
    rho = jnp.sqrt((STD**2 + tau**2) / (STD**2 + sigma**2))[:, None]
    np.testing.assert_allclose(flow_maps.jump(EXACT, x, sigma, tau), MEAN + rho * (x - MEAN), rtol=1e-12)
    levels = np.geomspace(2.0, 0.5, 10_001)
    slow = flow_maps.sample(flow_maps.of_denoiser(DENOISE), x, levels)
    np.testing.assert_allclose(slow, flow_maps.jump(EXACT, x, 2.0, 0.5), rtol=0, atol=2e-4)


def test_its_two_ends_are_the_denoiser_and_the_consistency_function():
    x, sigma, _ = points()
    np.testing.assert_allclose(flow_maps.diagonal(EXACT)(x, sigma), DENOISE(x, sigma), rtol=1e-12)
    end = MEAN + STD / jnp.sqrt(STD**2 + sigma**2)[:, None] * (x - MEAN)
    np.testing.assert_allclose(flow_maps.ending(EXACT)(x, sigma), end, rtol=1e-12)
    low = 0.04
    np.testing.assert_allclose(flow_maps.ending(EXACT, low)(x, sigma), flow_maps.jump(EXACT, x, sigma, low), rtol=1e-12)


@pytest.mark.parametrize("levels", [(5.0, 0.0), (5.0, 1.0, 0.0), (5.0, 4.9, 2.0, 0.3, 0.01, 0.0), (5.0, 0.4)])
def test_jumps_compose(levels):
    x, *_ = points()
    found = flow_maps.sample(EXACT, x, levels)
    np.testing.assert_allclose(found, flow_maps.jump(EXACT, x, 5.0, levels[-1]), rtol=1e-12)


def test_average_velocity_and_back():
    x, sigma, tau = points()
    t, r = sigma / (1 + sigma), tau / (1 + tau)
    z = (1 - t)[:, None] * x
    u = flow_maps.average_velocity(EXACT)
    moved = (1 - r)[:, None] * flow_maps.jump(EXACT, x, sigma, tau)
    np.testing.assert_allclose(z - (t - r)[:, None] * u(z, t, r), moved, rtol=0, atol=1e-12)
    np.testing.assert_allclose(flow_maps.of_average_velocity(u)(x, sigma, tau), EXACT(x, sigma, tau), rtol=1e-9)
    # on the diagonal it is the velocity of the flow
    np.testing.assert_allclose(u(z, t, t), denoisers.velocity(DENOISE)(x, sigma), rtol=1e-9)


def test_a_network_is_given_tau_beside_its_other_conditions():
    seen = {}

    def denoise(x, sigma, cond=None):
        seen.update(cond)
        return x

    flow_maps.of_network(denoise)(jnp.zeros((2, 1)), 3.0, jnp.array([0.0, 1.0]), {"label": jnp.array([1, 2])})
    np.testing.assert_allclose(seen["tau"], [0.0, 500.0])
    assert list(seen["label"]) == [1, 2]
    assert flow_maps.on_diagonal({"label": 0}, None, 1.0, 2) is None
    np.testing.assert_allclose(flow_maps.on_diagonal({"tau": 0}, None, 1.0, 2)["tau"], [500.0, 500.0])
    assert flow_maps.on_diagonal({"tau": 0}, {"tau": 3.0}, 1.0, 2) == {"tau": 3.0}


@pytest.mark.parametrize("levels", [(5.0,), (5.0, 5.0), (1.0, 2.0), (1.0, -0.1)])
def test_levels_that_cannot_be(levels):
    with pytest.raises(ValueError, match="strictly descending"):
        flow_maps.sample(EXACT, jnp.zeros((1, 1)), levels)
