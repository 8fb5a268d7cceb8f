"""What a Fréchet distance of images must do: zero, monotone, the same however it is computed."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from sklearn.datasets import load_digits

from jaxdiff.evaluation import FeatureNet, extract, feature_net, frechet_distance

RNG = np.random.default_rng(0)
DIGITS = load_digits()
IMAGES = (DIGITS.images / 8 - 1).astype(np.float32)[..., None]
FIRST, SECOND = IMAGES[:890], IMAGES[890:1780]


def random_network():
    """Two random convolutions and a spatial mean: 16 features."""
    kernels = [jnp.asarray(RNG.normal(size=shape) * 0.3, jnp.float32) for shape in ((3, 3, 1, 8), (3, 3, 8, 16))]

    def apply(kernels, images):
        for kernel in kernels:
            images = jax.nn.relu(
                jax.lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            )
        return {"features": images.mean((1, 2))}

    return FeatureNet("random", "", "none", jax.tree_util.Partial(apply, kernels))


def distance(net, a, b, sharding=None, batch=128):
    return frechet_distance(*(extract(net, np.array_split(x, 3), sharding, batch_size=batch).moments for x in (a, b)))


@pytest.fixture(scope="module", params=["random", "digits"])
def net(request):
    return random_network() if request.param == "random" else feature_net("digits")


def test_a_set_has_no_distance_from_itself_in_any_order(net):
    assert distance(net, FIRST, FIRST) < 1e-6
    assert distance(net, FIRST, FIRST[RNG.permutation(len(FIRST))]) < 1e-6


def test_batches_and_devices_do_not_change_it(net):
    eight = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    found = [distance(net, FIRST, SECOND, *how) for how in ((None, 128), (None, 50), (eight, 128), (eight, 50))]
    assert found[0] > 1e-3
    np.testing.assert_allclose(found, found[0], atol=1e-6, rtol=1e-6)


def blurred(images, times):
    for _ in range(times):
        images = sum(np.roll(images, shift, axis) for axis in (1, 2) for shift in (-1, 0, 1)) / np.float32(6)
    return images


LADDERS = {
    "noise": lambda i: (
        SECOND + np.float32(0.1 * i) * np.random.default_rng(1).standard_normal(SECOND.shape, np.float32)
    ),
    "blur": lambda i: blurred(SECOND, i),
    "missing classes": lambda i: SECOND[DIGITS.target[890:1780] < 10 - 2 * i],
}


@pytest.mark.parametrize("ladder", LADDERS)
def test_it_grows_with_damage(ladder):
    found = [distance(feature_net("digits"), FIRST, LADDERS[ladder](i)) for i in range(5)]
    assert all(a < b for a, b in itertools.pairwise(found)), found
