"""Each kind of resizing against the program that defines it."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from jaxdiff.models.resize import RESIZERS, as_float, as_rgb, resize, weights

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "inception.npz")
IMAGES = GOLDEN["images"][:1]


@pytest.mark.parametrize("side", [61, 17])
def test_bilinear_is_torchs(side):
    ours = resize(jnp.asarray(IMAGES, jnp.float32), side, "bilinear")
    np.testing.assert_allclose(ours, GOLDEN[f"resized/{side}"], atol=2e-4, rtol=0)


@pytest.mark.parametrize("side", [61, 17])
@pytest.mark.parametrize("contrast", [False, True])  # edges between 0 and 255 overshoot
def test_clean_is_pillows_bicubic_on_floats_clipped_to_eight_bits(side, contrast):
    pixels = np.where(IMAGES > 127, 255, 0) if contrast else IMAGES
    channels = [Image.fromarray(pixels[0, :, :, c].astype(np.float32)) for c in range(3)]
    plain = np.stack([np.asarray(c.resize((side, side), Image.Resampling.BICUBIC)) for c in channels], axis=-1)
    assert (np.abs(plain - 127.5).max() > 130) == contrast
    ours = resize(as_float(pixels.astype(np.uint8)), side, "clean")[0]
    np.testing.assert_allclose(ours * 127.5 + 127.5, plain.clip(0, 255), atol=2e-4, rtol=0)


def test_tensorflow_puts_pixels_at_multiples_of_the_ratio():
    np.testing.assert_allclose(weights(2, 3, "tensorflow"), [[1, 0], [1 / 3, 2 / 3], [0, 1]], atol=1e-12)
    np.testing.assert_allclose(weights(4, 2, "tensorflow"), [[1, 0, 0, 0], [0, 0, 1, 0]], atol=1e-12)
    square = jnp.asarray([[2.0, 2], [4, 4]]).reshape(1, 2, 2, 1)
    expected = [[2, 2, 2], [10 / 3, 10 / 3, 10 / 3], [4, 4, 4]]
    np.testing.assert_allclose(resize(square, 3, "tensorflow")[0, :, :, 0], expected, rtol=1e-6)


@pytest.mark.parametrize("kind", RESIZERS)
def test_constant_images_stay_and_the_same_side_is_left_alone(kind):
    np.testing.assert_allclose(weights(13, 31, kind).sum(1), 1, rtol=1e-12)
    np.testing.assert_allclose(weights(13, 13, kind), np.eye(13), atol=1e-12)
    x = jnp.asarray(np.random.default_rng(0).random((1, 9, 9, 2)), jnp.float32)
    np.testing.assert_array_equal(resize(x, 9, kind), x)


def test_the_kinds_differ_as_published_values_do():
    big = jnp.asarray(IMAGES, jnp.float32)
    bilinear, clean, tensorflow = (resize(big, 13, kind) for kind in ("bilinear", "clean", "tensorflow"))
    assert jnp.abs(bilinear - clean).max() > 0.5
    assert jnp.abs(bilinear - tensorflow).max() > 0.5


def test_pixels_and_channels():
    np.testing.assert_allclose(as_float(np.array([[[[0], [255]]]], np.uint8)).ravel(), [-1, 1])
    grey = as_rgb(jnp.full((2, 3, 3, 1), 0.25))
    assert grey.shape == (2, 3, 3, 3)
    with pytest.raises(ValueError, match="NHWC"):
        as_float(np.zeros((8, 8, 1), np.uint8))
    with pytest.raises(ValueError, match="int32"):
        as_float(np.zeros((1, 8, 8, 1), np.int32))
    with pytest.raises(ValueError, match="got 4"):
        as_rgb(np.zeros((1, 8, 8, 4), np.float32))
    with pytest.raises(ValueError, match="did you mean 'bilinear'"):
        resize(jnp.zeros((1, 8, 8, 3)), 8, "bilinar")
