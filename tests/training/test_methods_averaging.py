"""Averages of parameters against their closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paths import GOLDEN

from jaxdiff.methods import averaging

BATCH = 32


def run(decay, values):
    """The average after each of a run of scalar parameters, and the decays used."""

    def step(average, inputs):
        rate = decay(inputs[0], BATCH)
        average = averaging.average(rate, {"a": average}, {"a": inputs[1]})["a"]
        return average, (average, 1 - rate)

    inputs = jnp.arange(1, len(values) + 1), jnp.asarray(values, jnp.float32)
    averages, decays = jax.lax.scan(step, jnp.float32(7.0), inputs)[1]
    return np.asarray(averages, np.float64), np.asarray(decays, np.float64)


def test_constant():
    values = np.sin(np.arange(20.0))
    averages, _ = run(averaging.constant(0.8), values)
    n = len(values)
    wanted = 0.8**n * 7.0 + 0.2 * sum(0.8 ** (n - 1 - i) * v for i, v in enumerate(values))
    np.testing.assert_allclose(averages[-1], wanted, rtol=1e-5)
    np.testing.assert_allclose(run(averaging.constant(0.0), values)[0], values, atol=1e-6)


def test_half_life_with_ramp_up_is_edms():
    """NVlabs/edm, training_loop.py: the half-life is at most ramp times the images seen before the step."""
    _, decays = run(averaging.half_life(images=500.0, ramp=0.25), np.zeros(100))
    for step, found in enumerate(decays):
        half_life = min(500.0, step * BATCH * 0.25)
        np.testing.assert_allclose(found, 0.5 ** (BATCH / max(half_life, 1e-8)), rtol=1e-5, atol=1e-30)
    assert decays[0] == 0  # the first step's parameters replace the initial ones
    assert len(set(decays[63:])) == 1 and decays[62] < decays[63]  # 63 x 32 x 0.25 > 500


def test_half_life_means_what_it_says():
    values = np.r_[np.zeros(50), np.ones(20)]
    averages, decays = run(averaging.half_life(images=BATCH * 20.0, ramp=0.0), values)
    assert len(set(decays)) == 1
    before = averages[49]
    np.testing.assert_allclose(1 - averages[-1], (1 - before) / 2, rtol=1e-5)  # 20 steps later half of the way is gone


@pytest.mark.parametrize("sigma_rel", [0.05, 0.10, 0.25])
def test_power_function_has_its_width(sigma_rel):
    """EDM2, equations 121 to 126: the weights are those of t^gamma, whose relative width is sigma_rel."""
    steps = 1500
    rate = averaging.power(sigma_rel)
    decays = 1 - np.array([float(rate(jnp.int32(t), BATCH)) for t in (1, 2, 10, steps)])
    gamma = np.log(decays[2]) / np.log(1 - 1 / 10) - 1
    np.testing.assert_allclose((gamma + 1) / ((gamma + 2) ** 2 * (gamma + 3)), sigma_rel**2, rtol=1e-5)
    assert decays[0] == 0
    betas = (1 - 1 / np.arange(1, steps + 1)) ** (gamma + 1)
    weights = (1 - betas) * np.r_[np.cumprod(betas[::-1])[::-1][1:], 1.0]  # of the parameters of each step in the last
    np.testing.assert_allclose(weights.sum(), 1, rtol=1e-9)
    t = np.arange(1, steps + 1) / steps
    mean = (weights * t).sum()
    np.testing.assert_allclose(np.sqrt((weights * (t - mean) ** 2).sum()), sigma_rel, rtol=0.01)
    np.testing.assert_allclose(mean, (gamma + 1) / (gamma + 2), rtol=0.01)
    late = slice(steps // 2, None)
    np.testing.assert_allclose(weights[late], (gamma + 1) / steps * t[late] ** gamma, rtol=0.02)


def test_power_function_runs_with_the_weights_of_its_closed_form():
    values = np.cos(np.arange(40.0))
    averages, decays = run(averaging.power(0.1), values)
    weights = (1 - decays) * np.r_[np.cumprod(decays[::-1])[::-1][1:], 1.0]
    np.testing.assert_allclose(averages[-1], (weights * values).sum(), rtol=1e-4)


@pytest.mark.parametrize("steps", [1000, 10**6, 7 * 10**6])
def test_power_function_keeps_its_digits_in_long_runs(steps):
    gamma = max(np.roots([1, 7, 16 - 400, 12 - 400]).real)  # of sigma_rel 0.05
    wanted = -np.expm1((gamma + 1) * np.log1p(-1 / steps))
    np.testing.assert_allclose(averaging.power(0.05)(jnp.int32(steps), BATCH), wanted, rtol=1e-6)


def test_averages_stay_in_float32_and_do_not_stall():
    """A decay of 0.9999 moves an average by parts that bfloat16 could not hold."""
    averages, _ = run(averaging.constant(0.9999), np.full(10, 8.0))
    assert (np.diff(averages) > 0).all()
    assert averaging.average(jnp.float32(0.5), jnp.float32(1), jnp.float32(2)).dtype == jnp.float32


@pytest.mark.parametrize("decay", [-0.1, 1.0, 1.5])
def test_impossible_decays(decay):
    with pytest.raises(ValueError, match=r"must be in \[0, 1\)"):
        averaging.constant(decay)


def test_names():
    assert set(averaging.DECAYS) == {"constant", "half_life", "power"}
    assert float(averaging.make("constant", decay=0.25)(jnp.int32(1), BATCH)) == 0.75


def test_exponents_decays_and_coefficients_are_the_published_ones():
    with np.load(GOLDEN / "phema.npz") as z:
        for i, width in enumerate(z["std"]):
            np.testing.assert_allclose(averaging.exponent(width), z["exp"][i], rtol=1e-9)
            found = averaging.power_decay(width, z["beta_t_next"], z["beta_t_delta"])
            np.testing.assert_allclose(found, z["beta"][i], rtol=1e-9, atol=1e-12)
        found = averaging.posthoc_coefficients(z["in_ofs"], z["in_std"], z["out_ofs"], z["std"])
        np.testing.assert_allclose(found, z["coefficients"], atol=1e-9)
        assert found.dtype == np.float64
        order = np.random.default_rng(0).permutation(len(z["in_ofs"]))
        shuffled = averaging.posthoc_coefficients(z["in_ofs"][order], z["in_std"][order], z["out_ofs"], z["std"])
        np.testing.assert_allclose(shuffled, found[order], atol=1e-9)


def test_coefficients_fit_the_profiles():
    """Least squares by brute force on a fine grid: no other combination is nearer, and it is near."""
    steps, widths = np.repeat(np.arange(1, 11) * 10, 2), np.tile([0.05, 0.1], 10)
    t = (np.arange(20_000) + 0.5) / 200

    def profile(end, width):
        gamma = averaging.exponent(width)
        return np.where(t <= end, (gamma + 1) / end * (t / end) ** gamma, 0.0)

    basis = np.stack([profile(*pair) for pair in zip(steps, widths, strict=True)], 1)
    for width in (0.06, 0.075, 0.09):
        fit = np.linalg.lstsq(basis, profile(100, width), rcond=None)[0]
        found = averaging.posthoc_coefficients(steps, widths, 100, width)[:, 0]
        np.testing.assert_allclose(found, fit / fit.sum(), atol=1e-4)
        residual = basis @ found - profile(100, width)
        assert np.square(residual).sum() < 1e-4 * np.square(profile(100, width)).sum()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((10, 20), (0.1, 0.4), 20, 0.1), r"must be in \(0, 0.2886\], got 0.4"),
        (((10, 10), (0.1, 0.1), 10, 0.2), "same step and width"),
        (((0, 10), (0.1, 0.1), 10, 0.2), "steps above 0"),
        (((10, np.inf), (0.1, 0.1), 10, 0.2), "steps above 0"),
        (((10, 20, 30), (0.1, 0.2), 30, 0.1), "3 steps and widths of shape"),
        (((), (), 30, 0.1), "0 steps"),
    ],
)
def test_impossible_coefficients(arguments, message):
    with pytest.raises(ValueError, match=message):
        averaging.posthoc_coefficients(*arguments)
