"""GITS against brute force."""

from itertools import combinations, pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdiff import denoisers, solvers
from jaxdiff.denoisers import noise_prediction
from jaxdiff.solvers.gits import best_path, jump_costs


@pytest.fixture(scope="module")
def problem():
    rng = np.random.default_rng(0)
    denoise = denoisers.gaussian_mixture(rng.uniform(-0.6, 0.6, (5, 4)), 0.15)
    x = 80 * jax.random.normal(jax.random.key(0), (32, 4))
    return denoise, x, solvers.grid(13, 0.006, 80)


def test_costs_equal_explicit_jumps(x64, problem):
    denoise, x, sigmas = problem
    states = np.asarray(solvers.solve(denoise, x.astype(jnp.float64), sigmas, "ipndm", trajectory=True))
    slopes = np.stack(
        [np.asarray(noise_prediction(denoise)(jnp.asarray(s), t)) for s, t in zip(states, sigmas, strict=True)]
    )
    costs = jump_costs(states, slopes, sigmas)
    chord = states[0] - states[-1]
    unit = chord / np.linalg.norm(chord, axis=1, keepdims=True)

    def deviation(point):
        offset = point - states[-1]
        return np.linalg.norm(offset - (offset * unit).sum(1, keepdims=True) * unit, axis=1).mean()

    for i, j in [(0, 1), (0, 12), (3, 7), (10, 12)]:
        landed = states[i] + (sigmas[j] - sigmas[i]) * slopes[i]
        np.testing.assert_allclose(costs[i, j], deviation(landed) - deviation(states[j]), rtol=1e-6, atol=1e-9)
    assert np.isinf(costs[5, 5]) and np.isinf(costs[5, 2])


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_the_path_is_the_best_of_all_paths(n):
    rng = np.random.default_rng(n)
    costs = np.where(np.triu(np.ones((8, 8)), 1) > 0, rng.normal(size=(8, 8)), np.inf)
    value = lambda path: sum(1.15**k * costs[i, j] for k, (i, j) in enumerate(pairwise(path)))  # noqa: E731
    best = min(((0, *middle, 7) for middle in combinations(range(1, 7), n - 2)), key=value)
    assert best_path(costs, n, 1.15) == list(best)


def test_the_grid_found_beats_the_polynomial_one_at_few_steps(problem):
    denoise, x, _ = problem
    fine = solvers.grid(61, 0.006, 80)
    found = solvers.gits(denoise, x, fine, 5)
    assert set(found) <= set(fine) and (found[0], found[-1]) == (80, 0.006)
    fresh = 80 * jax.random.normal(jax.random.key(9), (512, 4))
    truth = solvers.solve(denoise, fresh, solvers.grid(257, 0.006, 80), "heun")
    error = lambda sigmas: float(jnp.abs(solvers.solve(denoise, fresh, sigmas, "euler") - truth).mean())  # noqa: E731
    assert error(found) < 0.8 * error(solvers.grid(5, 0.006, 80))


def test_bad_n_says_what_is_allowed(problem):
    with pytest.raises(ValueError, match="13 timestamps, got n=14"):
        solvers.gits(*problem, 14)
