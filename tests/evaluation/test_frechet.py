"""The Fréchet distance against closed forms, SciPy's matrix square root, and itself streamed and merged."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from jaxdiff.evaluation import Moments, frechet_distance, load_moments, save_moments
from jaxdiff.evaluation.frechet import empty, merge, moments_of, update


def gaussian(mean, covariance, count=1000):
    return Moments(count, np.asarray(mean, float), np.asarray(covariance, float) * (count - 1))


def features(seed, n=200, d=12):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, d)) @ rng.normal(size=(d, d)) + rng.normal(size=d)


def close(a, b, tolerance=1e-12):
    assert a.count == b.count
    np.testing.assert_allclose(a.mean, b.mean, rtol=tolerance, atol=tolerance * np.abs(b.mean).max())
    np.testing.assert_allclose(a.scatter, b.scatter, rtol=0, atol=tolerance * np.abs(b.scatter).max())


def test_diagonal_covariances_have_a_closed_form():
    rng = np.random.default_rng(0)
    (m, n), (s, t) = rng.normal(size=(2, 7)), rng.uniform(0.1, 3, (2, 7))
    expected = ((m - n) ** 2).sum() + ((s - t) ** 2).sum()
    got = frechet_distance(gaussian(m, np.diag(s**2)), gaussian(n, np.diag(t**2)))
    assert got == pytest.approx(expected, rel=1e-12)


def test_scaling_all_features_scales_the_covariance_term():
    x = features(1)
    covariance = np.cov(x, rowvar=False)
    expected = 4 * (x.mean(0) ** 2).sum() + 4 * np.trace(covariance)  # (3 - 1)^2 of both
    assert frechet_distance(x, 3 * x) == pytest.approx(expected, rel=1e-10)


def test_agrees_with_scipy_square_root():
    x, y = features(2), features(3, n=300)
    a, b = np.cov(x, rowvar=False), np.cov(y, rowvar=False)
    root = scipy.linalg.sqrtm(a @ b)
    expected = ((x.mean(0) - y.mean(0)) ** 2).sum() + np.trace(a + b - 2 * root.real)
    assert frechet_distance(x, y) == pytest.approx(expected, rel=1e-9)
    assert frechet_distance(x, y) == pytest.approx(frechet_distance(y, x), rel=1e-12)


def test_rotation_does_not_matter():
    x, y = features(4), features(5)
    rotation = np.linalg.qr(np.random.default_rng(0).normal(size=(12, 12)))[0]
    assert frechet_distance(x @ rotation, y @ rotation) == pytest.approx(frechet_distance(x, y), rel=1e-10)


@pytest.mark.parametrize("n", [5, 200])
def test_equal_sets_are_at_zero_even_with_fewer_samples_than_features(n):
    x = features(6, n=n)
    assert 0 <= frechet_distance(x, x.copy()) < 1e-11 * np.trace(np.cov(x, rowvar=False))


def test_singular_covariances_on_disjoint_axes():
    a, b = np.diag([2.0, 0, 0]), np.diag([0, 3.0, 0])
    assert frechet_distance(gaussian(np.zeros(3), a), gaussian(np.zeros(3), b)) == pytest.approx(5.0, rel=1e-12)


def test_streaming_equals_batch_far_from_the_origin():
    x = features(7, n=501) + 1e6  # sums of squares would be right to five digits only
    streamed = None
    for part in np.array_split(x, 9):
        streamed = update(streamed, part)
    close(streamed, moments_of(x), tolerance=1e-10)
    expected = np.cov(x, rowvar=False)
    np.testing.assert_allclose(streamed.covariance, expected, rtol=0, atol=1e-10 * np.abs(expected).max())


def test_merge_in_any_tree_equals_all():
    x = features(8, n=90)
    a, b, c = (moments_of(part) for part in np.split(x, [7, 40]))
    close(merge(merge(a, b), c), moments_of(x))
    close(merge(a, merge(c, b)), moments_of(x))
    close(merge(empty(12), a), a)
    close(merge(merge(empty(12), empty(12)), a), a)
    close(update(a, x[:0]), a)


def test_half_precision_and_jax_features_are_summed_in_double():
    x = jnp.asarray(np.full((4096, 2), 300.0) + np.arange(2), jnp.bfloat16)
    assert moments_of(x).mean.dtype == np.float64
    np.testing.assert_array_equal(moments_of(x).mean, np.asarray(x, np.float64)[0])


def test_statistics_files_round_trip(tmp_path):
    moments = moments_of(features(9))
    save_moments(tmp_path / "reference.npz", moments)
    close(load_moments(tmp_path / "reference.npz"), moments)
    with pytest.raises(ValueError, match=r"200 images.*count=7"):
        load_moments(tmp_path / "reference.npz", count=7)
    with pytest.raises(FileNotFoundError, match=r"none.npz.*tried /"):
        load_moments(tmp_path / "none.npz")
    np.savez(tmp_path / "foreign.npz", mu=moments.mean, sigma=moments.covariance)
    close(load_moments(tmp_path / "foreign.npz", count=200), moments)
    with pytest.raises(ValueError, match="pass count="):
        load_moments(tmp_path / "foreign.npz")
    np.savez(tmp_path / "other.npz", mean=moments.mean)
    with pytest.raises(ValueError, match=r"mu.*sigma.*mean"):
        load_moments(tmp_path / "other.npz")
    with pytest.raises(ValueError, match=r"\.npz"):
        save_moments(tmp_path / "reference.json", moments)


def test_errors_say_what_was_given():
    x = features(10)
    with pytest.raises(ValueError, match=r"second.*1 sample"):
        frechet_distance(x, x[:1])
    with pytest.raises(ValueError, match="width 12 and 5"):
        frechet_distance(x, x[:, :5])
    with pytest.raises(ValueError, match="width 12 and 5"):
        merge(moments_of(x), moments_of(x[:, :5]))
    with pytest.raises(ValueError, match=r"got shape \(12,\)"):
        frechet_distance(x, x[0])
    x[[17, 30], 2] = np.nan, np.inf
    with pytest.raises(ValueError, match=r"2 of 200.*finite.*row 17"):
        frechet_distance(x, features(11))
    with pytest.raises(ValueError, match="2 samples, got 1"):
        _ = moments_of(features(12)[:1]).covariance
    with pytest.raises(ValueError, match="real numbers"):
        moments_of(np.ones((3, 2), complex))
