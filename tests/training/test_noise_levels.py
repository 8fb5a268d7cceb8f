"""The laws of noise levels against their distribution functions, and weights against their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxdiff import schedules
from jaxdiff.noise import levels

N = 50_000
KEY = jax.random.key(11)


def draw(law):
    return np.asarray(law(KEY, N), np.float64)


LAWS = {
    "lognormal": (levels.lognormal(-1.2, 1.2), lambda s: stats.norm.cdf(np.log(s), -1.2, 1.2)),
    "logit_normal": (
        levels.make_levels("logit_normal", mean=0.4, std=0.7),
        lambda s: stats.norm.cdf(np.log((s / (1 + s)) / (1 - s / (1 + s))), 0.4, 0.7),
    ),
    "uniform": (levels.uniform(1e-3, 1e3), lambda s: stats.uniform.cdf(s / (1 + s), 1 / 1001, 999 / 1001)),
    "cosine": (
        levels.cosine(1e-3, 1e3),
        lambda s: stats.uniform.cdf(2 / np.pi * np.arctan(s), *_span(2 / np.pi * np.arctan([1e-3, 1e3]))),
    ),
    "shifted": (
        levels.make_levels("uniform", 3.0),
        lambda s: stats.uniform.cdf((s / 3) / (1 + s / 3), 1 / 1001, 999 / 1001),
    ),
}


def _span(ends):
    return ends[0], ends[1] - ends[0]


@pytest.mark.parametrize("name", LAWS)
def test_the_law_of_the_levels(name):
    """Kolmogorov-Smirnov at a fixed key: the largest gap of the distribution functions."""
    law, cdf = LAWS[name]
    found = draw(law)
    assert (found > 0).all() and np.isfinite(found).all() and len(np.unique(found)) > 0.98 * N
    assert stats.kstest(found, cdf).statistic < 1.63 / np.sqrt(N)  # the 1 % point
    assert law(KEY, 7).shape == (7,) and law(KEY, 7).dtype == jnp.float32


def test_moments_of_edms_law():
    logs = np.log(draw(levels.lognormal()))
    np.testing.assert_allclose([logs.mean(), logs.std()], [-1.2, 1.2], atol=0.02)


def test_the_shift_is_sd3s():
    """t' = r t / (1 + (r - 1) t) in flow time is sigma -> r sigma."""
    base, moved = draw(levels.uniform()), draw(levels.shifted(levels.uniform(), 3.0))
    np.testing.assert_allclose(moved, 3 * base, rtol=1e-6)
    t = base / (1 + base)
    np.testing.assert_allclose(moved / (1 + moved), 3 * t / (1 + 2 * t), rtol=1e-5)


def test_discrete_levels_are_uniform_over_the_table():
    table = schedules.sigma_table(schedules.linear_alpha_bar())
    found = np.asarray(levels.discrete(table)(KEY, N))
    index = np.searchsorted(np.asarray(table, np.float32), found)
    np.testing.assert_array_equal(np.asarray(table, np.float32)[index], found)
    counts = np.bincount(index * 10 // len(table), minlength=10)
    np.testing.assert_allclose(counts / N, 0.1, atol=0.006)
    assert index.min() == 0 and index.max() == len(table) - 1


@pytest.mark.parametrize("bounds", [(0.0, 1.0), (2.0, 1.0), (-1.0, 1.0)])
def test_impossible_bounds(bounds):
    with pytest.raises(ValueError, match="0 < sigma_min < sigma_max"):
        levels.uniform(*bounds)


@pytest.mark.parametrize("table", [[], [[1.0]], [1.0, 0.0]])
def test_impossible_tables(table):
    with pytest.raises(ValueError, match="1-D table of positive sigmas"):
        levels.discrete(table)


# ------------------------------------------------------------------------------------------ weights

SIGMA = np.array([0.01, 0.1, 0.4, 1.0, 3.0, 50.0])
SNR = SIGMA**-2.0


@pytest.mark.parametrize(
    ("name", "options", "wanted"),
    [
        ("edm", {"sigma_data": 0.5}, (SIGMA**2 + 0.25) / (SIGMA * 0.5) ** 2),
        ("edm", {"sigma_data": 1.0}, (SIGMA**2 + 1) / SIGMA**2),
        ("eps", {}, SNR),
        ("x0", {}, np.ones(6)),
        ("min_snr", {"gamma": 5.0}, np.minimum(SNR, 5)),
        ("sigmoid", {"bias": 2.0}, SNR / (1 + np.exp(-(2 - np.log(SNR))))),
        ("flow", {}, (1 + 1 / SIGMA) ** 2),
    ],
)
def test_weights(name, options, wanted):
    found = levels.make_weight(name, **options)(jnp.asarray(SIGMA, jnp.float32))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_weights_are_the_errors_of_other_predictions():
    """eps: |eps' - eps|^2; flow: |v' - v|^2 with v = eps - x0; edm: the network's own output has unit weight."""
    rng = np.random.RandomState(0)
    x0, eps, guess = rng.normal(size=(3, len(SIGMA)))
    x = x0 + SIGMA * eps
    error = (guess - x0) ** 2
    weight = lambda name: np.asarray(levels.make_weight(name)(jnp.asarray(SIGMA, jnp.float32)), np.float64)  # noqa: E731
    guessed_eps = (x - guess) / SIGMA
    np.testing.assert_allclose(weight("eps") * error, (guessed_eps - eps) ** 2, rtol=1e-4)
    np.testing.assert_allclose(weight("flow") * error, ((guessed_eps - guess) - (eps - x0)) ** 2, rtol=1e-4)
    c_out = SIGMA * 0.5 / np.sqrt(SIGMA**2 + 0.25)
    np.testing.assert_allclose(weight("edm"), c_out**-2.0, rtol=1e-5)
