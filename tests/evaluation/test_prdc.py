"""Precision, recall, density and coverage against loops over points and cases that can be counted by hand."""

import math

import numpy as np
import pytest

from jaxdiff.evaluation import prdc


def by_loops(real, fake, k):
    """The definitions, point by point."""

    def radius(points, i):
        return sorted(math.dist(points[i], other) for j, other in enumerate(points) if j != i)[k - 1]

    inside_real = [[math.dist(r, f) < radius(real, i) for i, r in enumerate(real)] for f in fake]
    inside_fake = [[math.dist(r, f) < radius(fake, j) for j, f in enumerate(fake)] for r in real]
    return {
        "precision": sum(map(any, inside_real)) / len(fake),
        "recall": sum(map(any, inside_fake)) / len(real),
        "density": sum(map(sum, inside_real)) / (k * len(fake)),
        "coverage": sum(any(column) for column in zip(*inside_real, strict=True)) / len(real),
    }


@pytest.mark.parametrize(("n", "m", "d", "k", "chunk"), [(40, 40, 3, 5, 1024), (37, 23, 8, 3, 7), (20, 50, 2, 1, 1)])
def test_against_loops(n, m, d, k, chunk):
    rng = np.random.default_rng(n + k)
    real, fake = rng.normal(size=(n, d)), 0.8 * rng.normal(size=(m, d)) + 0.3
    assert prdc(real, fake, k, chunk=chunk) == pytest.approx(by_loops(real, fake, k), abs=1e-12)


def test_far_from_the_origin():
    rng = np.random.default_rng(0)
    real, fake = rng.normal(size=(2, 60, 4))
    assert prdc(real + 1e7, fake + 1e7) == prdc(real, fake)


def test_disjoint_clouds_share_nothing():
    rng = np.random.default_rng(1)
    assert set(prdc(rng.normal(size=(30, 2)), 100 + rng.normal(size=(30, 2))).values()) == {0.0}


def test_a_copy_is_perfect():
    x = np.random.default_rng(2).normal(size=(50, 3))
    result = prdc(x, x.copy())
    assert (result["precision"], result["recall"], result["coverage"]) == (1, 1, 1)
    assert result["density"] == pytest.approx(1, abs=0.05)  # the k-th neighbour lies on the ball: rounding decides


def test_integers_on_a_line():
    """Real 0..5 with k = 2 have radii 2 1 1 1 1 2; fake points at 2 (four times), 0.5 and 40."""
    real, fake = np.arange(6.0)[:, None], np.array([2, 2, 2, 2, 0.5, 40.0])[:, None]
    result = prdc(real, fake, k=2)
    assert result["precision"] == 5 / 6
    assert result["density"] == pytest.approx(6 / (2 * 6))  # 2 is inside its own ball, 0.5 in those of 0 and 1
    assert result["coverage"] == 3 / 6  # 0 and 1 by 0.5, and 2
    # fake radii: 0 for the copies of 2 (open balls of no size), 1.5 around 0.5 holds 0 and 1; 38 around 40 holds 3, 4, 5
    assert result["recall"] == 5 / 6


def test_a_collapsed_generator_has_precision_without_recall():
    rng = np.random.default_rng(3)
    real = rng.normal(size=(200, 2))
    result = prdc(real, 0.01 * rng.normal(size=(200, 2)))
    assert result["precision"] == 1
    assert result["density"] > 1
    assert result["recall"] < 0.05
    assert result["coverage"] < 0.3


def test_errors_say_what_was_given():
    x = np.zeros((6, 2))
    with pytest.raises(ValueError, match=r"6 real.*got 6"):
        prdc(x, np.zeros((9, 2)), k=6)
    with pytest.raises(ValueError, match=r"5 fake.*got 4"):
        prdc(x, x[:4])
    with pytest.raises(ValueError, match=r"2 wide.*3"):
        prdc(x, np.zeros((6, 3)))
    with pytest.raises(ValueError, match="k=0"):
        prdc(x, x, k=0)
    with pytest.raises(ValueError, match=r"fake.*finite"):
        prdc(x, x + np.nan)
