"""KID against the definition, term by term, and its expectation in closed form."""

import numpy as np
import pytest

from jaxdiff.evaluation import kid

RNG = np.random.default_rng(0)


def test_it_is_the_sum_over_pairs():
    x, y = RNG.normal(size=(7, 3)), RNG.normal(size=(5, 3)) + 0.5

    def k(a, b):
        return (np.dot(a, b) / 3 + 1) ** 3

    expected = sum(k(a, b) for i, a in enumerate(x) for j, b in enumerate(x) if i != j) / 42
    expected += sum(k(a, b) for i, a in enumerate(y) for j, b in enumerate(y) if i != j) / 20
    expected -= 2 * sum(k(a, b) for a in x for b in y) / 35
    assert kid(x, y) == (pytest.approx(expected, rel=1e-12), 0.0)


def test_it_is_unbiased():
    """In one dimension k = 1 + 3xy + 3x²y² + x³y³, so MMD² is 3 dm1² + 3 dm2² + dm3² of the moments' differences."""
    x, y = RNG.normal(size=(200_000, 1)), RNG.normal(size=(200_000, 1)) * 1.5 + 1
    first, second, third = 1.0, 1 + 2.25 - 1, 1 + 3 * 2.25
    expected = 3 * first**2 + 3 * second**2 + third**2
    mean, std = kid(x, y, subsets=400, size=50)
    assert mean == pytest.approx(expected, abs=4 * std / 20)
    same, spread = kid(x, RNG.normal(size=(50_000, 1)), subsets=400, size=50)
    assert abs(same) < 4 * spread / 20


def test_errors():
    with pytest.raises(ValueError, match="3 and 4"):
        kid(np.zeros((5, 3)), np.zeros((5, 4)))
    with pytest.raises(ValueError, match="at least 2"):
        kid(np.zeros((1, 3)), np.zeros((5, 3)))
