"""DINOv2 against a PyTorch program with the same seeded weights, and its public names both ways."""

import runpy
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxdiff import weights
from jaxdiff.evaluation import digest, feature_net
from jaxdiff.models import dinov2

FOLDER = Path(__file__).parents[1] / "golden"
GOLDEN = np.load(FOLDER / "dinov2.npz")


@pytest.fixture(scope="module")
def arrays():
    return runpy.run_path(str(FOLDER / "seeded.py"))["weights"](GOLDEN["weights"])


def test_tokens_agree_with_torch(arrays):
    model, params = weights.load(arrays, "dinov2")
    assert model == dinov2.DINOv2(width=128, depth=3)
    unit = (GOLDEN["images"] / np.float32(255) - np.float32(dinov2.MEAN)) / np.float32(dinov2.STD)
    out = jax.jit(model.apply)({"params": params}, unit)
    for name in ("features", "patches"):
        assert out[name].shape == GOLDEN[name].shape
        assert np.abs(out[name] - GOLDEN[name]).max() <= 1e-5 * np.abs(GOLDEN[name]).max()


def test_as_a_feature_network(arrays, tmp_path):
    path = tmp_path / "dinov2.safetensors"
    weights.files.write(path, arrays)
    net = feature_net("dinov2", path, resize="clean", side=28)
    assert (net.name, net.resize, net.sha256) == ("dinov2", "clean-28", digest(path))
    images = GOLDEN["images"][:, :28, :28]
    out = net.apply(images)
    assert out["features"].shape == (2, 128) and out["patches"].shape == (2, 2, 2, 128)
    assert jax.eval_shape(feature_net("dinov2", path).apply, images)["features"].shape == (2, 128)


def test_names_both_ways_and_sizes(arrays):
    model, params = weights.load(arrays, "dinov2")
    saved = weights.save(model, params, "dinov2")
    assert saved.keys() == arrays.keys() - {"mask_token"}
    assert all((saved[name] == arrays[name]).all() for name in saved)
    for width, depth, millions in ((384, 12, 22.1), (768, 12, 86.6), (1024, 24, 304.4)):  # published sizes
        sized = dinov2.DINOv2(width=width, depth=depth)
        shapes = jax.eval_shape(sized.init, jax.random.key(0), np.zeros((1, 14, 14, 3), np.float32))
        assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) / 1e6 == pytest.approx(millions, abs=0.06)


def test_positions_are_resampled_as_torch_does():
    """At the training grid nothing changes; a constant table stays constant on any grid."""
    np.testing.assert_array_equal(dinov2.resampling(37, 37), np.eye(37))
    np.testing.assert_allclose(dinov2.resampling(16, 37).sum(1), 1, rtol=1e-12)


def test_what_it_is_not(arrays):
    with pytest.raises(weights.WeightsError, match="register"):
        weights.load({**arrays, "register_tokens": np.zeros((1, 4, 128))}, "dinov2")
    with pytest.raises(weights.WeightsError, match="ViT-g"):
        weights.load({**arrays, "blocks.0.mlp.w12.weight": np.zeros((4, 4))}, "dinov2")
    with pytest.raises(ValueError, match=r"multiples of 14, got 28x30"):
        jax.eval_shape(dinov2.DINOv2(128, 1).init, jax.random.key(0), np.zeros((1, 28, 30, 3), np.float32))
    with pytest.raises(FileNotFoundError, match="dinov2_vitl14_pretrain"):
        feature_net("dinov2")
