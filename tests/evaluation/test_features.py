"""Feature networks by name, and extraction: padded, compiled once, the same on one device and on eight."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from sklearn.datasets import load_digits

from jaxdiff.evaluation import FeatureNet, extract, feature_net, frechet_distance, from_uint8, prdc, to_uint8


@pytest.fixture(scope="module")
def digits():
    return (load_digits().images / 8 - 1).astype(np.float32)[..., None]


def linear(traces=None):
    """A network that is a matrix, to count traces of and compare to the matrix."""
    matrix = jnp.asarray(np.random.default_rng(0).normal(size=(64, 5)), jnp.float32)

    def apply(matrix, images):
        if traces is not None:
            traces.append(images.shape)
        return {"features": images.reshape(len(images), -1) @ matrix, "probabilities": None}

    return FeatureNet("linear", "", "none", jax.tree_util.Partial(apply, matrix)), np.asarray(matrix)


def test_digits_net_is_built_in(digits):
    net = feature_net("digits")
    assert (net.name, net.resize, len(net.sha256)) == ("digits", "none", 64)
    out = jax.jit(lambda apply, x: apply(x))(net.apply, digits[:20])
    assert out["features"].shape == (20, 64)
    np.testing.assert_allclose(out["probabilities"].sum(-1), 1, rtol=1e-5)
    np.testing.assert_array_equal(out["probabilities"].argmax(-1), load_digits().target[:20])
    rounded = from_uint8(to_uint8(digits[:20]))
    np.testing.assert_allclose(net.apply(to_uint8(digits[:20]))["features"], net.apply(rounded)["features"], atol=1e-5)


def test_digits_features_tell_real_from_noisy(digits):
    net = feature_net("digits")
    first, second = digits[::2], digits[1::2]
    noise = 0.5 * np.random.default_rng(0).standard_normal(second.shape, np.float32)
    real, other, noisy = (extract(net, [x], keep=True) for x in (first, second, second + noise))
    assert frechet_distance(real.moments, other.moments) < 0.3 * frechet_distance(real.moments, noisy.moments)
    good, bad = prdc(real.features, other.features), prdc(real.features, noisy.features)
    assert good["precision"] > bad["precision"]
    assert good["density"] > bad["density"]


@pytest.mark.parametrize("sizes", [[30], [8, 8, 8, 6], [7, 16, 1, 6], [1, 29]])
def test_batches_of_any_size_give_each_image_once_and_one_trace(digits, sizes):
    traces = []
    net, matrix = linear(traces)
    batches = np.split(digits[:30], np.cumsum(sizes)[:-1])
    got = extract(net, batches, keep=True)
    np.testing.assert_allclose(got.features, digits[:30].reshape(30, -1) @ matrix, rtol=1e-4, atol=1e-4)
    assert got.moments.count == 30
    assert got.probabilities is None
    assert len(traces) == 1
    extract(net, batches)
    assert len(traces) == 1


def test_dict_batches_fixed_size_and_streams(digits):
    traces = []
    net, _ = linear(traces)
    got = extract(net, ({"image": digits[i : i + 10]} for i in range(0, 30, 10)), batch_size=4)
    extract(net, [digits[:9].astype(np.float64)], batch_size=4)  # NumPy's default is no other program
    assert traces == [(4, 8, 8, 1)]
    assert got.features is None
    np.testing.assert_allclose(got.moments.mean, extract(net, [digits[:30]]).moments.mean, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spec", [PartitionSpec("data"), PartitionSpec(("data", "fsdp")), PartitionSpec()])
def test_eight_devices_equal_one(digits, spec):
    assert jax.device_count() == 8
    sharding = NamedSharding(Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "fsdp")), spec)
    net = feature_net("digits")
    one, eight = (extract(net, np.array_split(digits[:300], 7), s, keep=True) for s in (None, sharding))
    assert one.moments.count == eight.moments.count == 300
    np.testing.assert_allclose(one.features, eight.features, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(one.probabilities, eight.probabilities, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(one.moments.scatter, eight.moments.scatter, rtol=1e-4, atol=1e-3)


def test_images_are_really_spread_over_the_devices(digits):
    seen = []

    def apply(images):
        jax.debug.inspect_array_sharding(images, callback=seen.append)
        return {"features": images.reshape(len(images), -1), "probabilities": None}

    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    extract(FeatureNet("pixels", "", "none", jax.tree_util.Partial(apply)), [digits[:20]], sharding)
    assert seen[0].shard_shape((24, 8, 8, 1)) == (3, 8, 8, 1)


def test_errors_say_what_to_do(digits, tmp_path):
    net, _ = linear()
    with pytest.raises(ValueError, match="did you mean 'inception'"):
        feature_net("incepton")
    with pytest.raises(FileNotFoundError, match=r"pt_inception-2015-12-05 .*save_file"):
        feature_net("inception")
    with pytest.raises(FileNotFoundError, match=r"lite0\.npz.*ImageNet"):
        feature_net("efficientnet_lite0", tmp_path / "lite0.npz")
    with pytest.raises(ValueError, match="empty"):
        extract(net, [])
    with pytest.raises(ValueError, match=r"got shape \(0, 8, 8, 1\)"):
        extract(net, [digits[:0]])
    with pytest.raises(ValueError, match=r"\(4, 8, 1\) float32.*\(8, 8, 1\) float32"):
        extract(net, [digits[:2], digits[:2, :4]])


def test_importing_the_package_is_light():
    code = "import sys, jaxdiff.evaluation as e; e.prdc, e.frechet_distance; print([m for m in sys.modules if '.' not in m])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not [name for name in ("flax", "scipy", "sklearn", "torch", "tensorflow", "jax") if f"'{name}'" in loaded]
