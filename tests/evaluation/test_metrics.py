"""Inception score and sliced Wasserstein distance against closed forms."""

import numpy as np
import pytest

from jaxdiff.evaluation import inception_score, sliced_wasserstein


def test_certain_and_balanced_predictions_score_the_number_of_classes():
    p = np.eye(7)[np.arange(700) % 7]
    assert inception_score(p, splits=10) == pytest.approx((7, 0), abs=1e-12)


def test_equal_predictions_score_one():
    p = np.tile([0.2, 0.5, 0.3, 0.0], (50, 1))
    assert inception_score(p, splits=5) == pytest.approx((1, 0), abs=1e-12)


def test_two_kinds_of_sample():
    """Rows (a, 1-a) and (1-a, a) alternate: log score = log 2 - H(a)."""
    a = 0.9
    p = np.tile([[a, 1 - a], [1 - a, a]], (30, 1))
    expected = 2 * a**a * (1 - a) ** (1 - a)
    assert inception_score(p, splits=3) == pytest.approx((expected, 0), rel=1e-12, abs=1e-12)


def test_splits_are_runs_in_the_given_order():
    p = np.eye(2)[np.repeat([0, 1], 10)]
    assert inception_score(p, splits=2) == pytest.approx((1, 0))
    assert inception_score(p, splits=1)[0] == pytest.approx(2)
    p = np.concatenate([np.eye(4), np.eye(4)[[0, 0, 0, 0]]])
    assert inception_score(p, splits=2) == pytest.approx((2.5, 1.5))  # scores 4 and 1


def test_score_errors():
    with pytest.raises(ValueError, match="softmax"):
        inception_score(np.ones((20, 3)))
    with pytest.raises(ValueError, match="softmax"):
        inception_score(np.tile([1.5, -0.5], (20, 1)))
    with pytest.raises(ValueError, match="several classes, got one"):
        inception_score(np.ones((20, 1)))  # a network without logits; not a score of 1
    with pytest.raises(ValueError, match="4; got 10"):
        inception_score(np.eye(4))


def test_one_dimension_is_the_distance_of_sorted_points():
    a, b = np.random.default_rng(0).normal(size=(2, 50, 1))
    expected = np.sqrt(np.mean((np.sort(a[:, 0]) - np.sort(b[:, 0])) ** 2))
    assert sliced_wasserstein(a, b, projections=3) == pytest.approx(expected, rel=1e-12)


def test_unequal_sizes_are_transported_exactly():
    """{0, 1} to {0, 1, 2}: a third stays, a sixth goes 0 to 1, a sixth stays at 1, a third goes 1 to 2."""
    a, b = np.array([[0.0], [1]]), np.array([[2.0], [0], [1]])
    assert sliced_wasserstein(a, b, projections=1) == pytest.approx(np.sqrt(1 / 6 + 1 / 3), rel=1e-12)
    x = np.random.default_rng(1).normal(size=(20, 3))
    assert sliced_wasserstein(x, np.repeat(x, 3, axis=0)) == pytest.approx(0, abs=1e-12)


def test_a_shift_in_many_directions():
    x, shift = np.random.default_rng(2).normal(size=(30, 5)), np.array([3.0, 0, 4, 0, 0])
    assert sliced_wasserstein(x, x + shift, projections=20000) == pytest.approx(5 / np.sqrt(5), rel=0.02)


def test_same_seed_same_number_whatever_the_blocks():
    a, b = np.random.default_rng(3).normal(size=(2, 40, 6))
    assert sliced_wasserstein(a, b, seed=1) == sliced_wasserstein(a, b, seed=1) != sliced_wasserstein(a, b, seed=2)
    assert sliced_wasserstein(a, b) == pytest.approx(sliced_wasserstein(b, a), rel=1e-12)


def test_sliced_errors():
    x = np.zeros((3, 2))
    with pytest.raises(ValueError, match="dimension 2 and 3"):
        sliced_wasserstein(x, np.zeros((3, 3)))
    with pytest.raises(ValueError, match="non-empty"):
        sliced_wasserstein(x, x[:0])
    with pytest.raises(ValueError, match="non-empty"):
        sliced_wasserstein(x, x, projections=0)
