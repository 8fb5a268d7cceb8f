"""The feature network that comes with the package: what it takes, what it is made of, and what it sees as worse."""

import hashlib

import jax
import numpy as np
import pytest

from experiments.evaluation import damage
from jaxdiff import data
from jaxdiff.configs import folder
from jaxdiff.evaluation import compact, extract, feature_net, frechet_distance


@pytest.fixture(scope="module")
def images():
    source = data.load("creatures", count=256)
    return np.asarray((source.batch(0, 256)["image"] * 127.5 + 127.5).round(), np.uint8)


@pytest.fixture(scope="module")
def distance(images):
    """From the second half of the images."""
    net = feature_net("compact")
    half = len(images) // 2
    moments = lambda pixels: extract(net, [pixels], batch_size=half).moments  # noqa: E731
    reference = moments(images[half:])
    return lambda pixels: frechet_distance(moments(pixels), reference)


def test_weights_are_small_and_hashed():
    model, params, sha256 = compact.load()
    stored = compact.WEIGHTS.read_bytes()
    assert sha256 == hashlib.sha256(stored).hexdigest() == feature_net("compact").sha256
    assert len(stored) < 2_000_000
    init = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 32, 32, 3), np.float32))["params"]
    assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, init)


def test_images_of_any_size_and_grey_ones():
    net = feature_net("compact")
    pixels = np.random.default_rng(0).integers(0, 256, (2, 16, 48, 1), np.uint8)
    grey, colour = (jax.eval_shape(net.apply, x)["features"] for x in (pixels, pixels.repeat(3, -1)))
    assert grey.shape == colour.shape == (2, 128) and net.resize == "clean-32"
    with pytest.raises(ValueError, match="1 or 3 channels, got 4"):
        net.apply(np.zeros((2, 32, 32, 4), np.float32))


@pytest.mark.parametrize(("kind", "strengths"), [("blur", (0.5, 1.0, 2.0)), ("noise", (0.06, 0.1, 0.2))])
def test_distances_grow_with_damage(images, distance, kind, strengths):
    clean, rng = images[: len(images) // 2], np.random.default_rng(0)
    damaged = [distance(getattr(damage, kind)(clean, strength, rng)) for strength in strengths]
    assert distance(clean) < damaged[0] < damaged[1] < damaged[2]


def test_it_is_the_default_for_images_and_for_nothing_else():
    assert folder.get_config("photos").eval.net == "compact"
    assert compact.suits((32, 32, 3)) and compact.suits((28, 28, 1))
    assert not compact.suits((2,)) and not compact.suits((32, 32, 4)) and not compact.suits((8, 8, 1))
