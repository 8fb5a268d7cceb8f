"""The FID Inception-v3 against a PyTorch program with the same seeded weights, and its public names both ways."""

import ast
import runpy
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxdiff import weights
from jaxdiff.evaluation import digest, feature_net
from jaxdiff.models.inception import Inception, preprocess

FOLDER = Path(__file__).parents[1] / "golden"
GOLDEN = np.load(FOLDER / "inception.npz")
draw = runpy.run_path(str(FOLDER / "seeded.py"))["draw"]
SHAPES = {name: ast.literal_eval(shape) for name, shape in zip(GOLDEN["names"].tolist(), GOLDEN["shapes"], strict=True)}


@pytest.fixture(scope="module")
def arrays():
    return {name: draw(name, shape) for name, shape in SHAPES.items()}


@pytest.fixture(scope="module")
def loaded(arrays):
    counter = {"Conv2d_1a_3x3.bn.num_batches_tracked": np.asarray(3)}  # in the public file, of no use
    return weights.load({**arrays, **counter}, "inception")


def test_features_logits_and_every_block_agree_with_torch(loaded, arrays, tmp_path):
    path = tmp_path / "inception.safetensors"
    weights.save(*loaded, "inception", path)
    net = feature_net("inception", path, side=139)

    def run(apply, images):
        out, state = loaded[0].apply(
            {"params": apply.args[0]},
            preprocess(images, "bilinear", 139),
            capture_intermediates=lambda module, _: (module.name or "").startswith("Mixed"),
        )
        blocks = {name: value["__call__"][0].mean((1, 2)) for name, value in state["intermediates"].items()}
        return out, blocks, apply(images)

    out, blocks, measured = jax.jit(run)(net.apply, GOLDEN["images"])
    for name, ours in {**{f"mean/{n}": v[:, ::8] for n, v in blocks.items()}, **out}.items():
        theirs = GOLDEN[name]
        assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max(), name
    assert len(blocks) == 11
    assert (net.resize, net.sha256) == ("bilinear-139", digest(path))
    np.testing.assert_allclose(measured["features"], out["features"], rtol=1e-5)
    unbiased = jax.nn.softmax(out["logits"] - arrays["fc.bias"])  # as the Inception score is defined
    np.testing.assert_allclose(measured["probabilities"], unbiased, rtol=1e-4)


def test_names_and_shapes_are_those_of_the_public_weights(loaded, arrays):
    saved = weights.save(*loaded, "inception")
    assert {name: value.shape for name, value in saved.items()} == SHAPES
    trained, classes, statistics = 23_834_568, 8 * (2048 + 1), 2 * 17_216  # the network of the paper, and what is added
    assert sum(value.size for value in saved.values()) == trained + classes + statistics
    assert all((saved[name] == value).all() for name, value in arrays.items())


def test_strict():
    arrays = {name: np.broadcast_to(np.float32(0), shape) for name, shape in SHAPES.items()}
    wrong = {**arrays, "fc.bias": np.zeros(7), "Mixed_7d.branch1x1.conv.weight": np.zeros(1)}
    del wrong["Mixed_5b.branch_pool.bn.running_var"]
    with pytest.raises(weights.WeightsError) as error:
        weights.load(wrong, "inception")
    for part in ("1 missing (Mixed_5b.branch_pool.bn.running_var)", "Mixed_7d", "fc.bias is (7,), expected (1008,)"):
        assert part in str(error.value)
    with pytest.raises(weights.WeightsError, match=r"no 'Conv2d_1a_3x3\.conv\.weight'"):
        weights.load({"x": np.zeros(1)}, "inception")
    with pytest.raises(weights.WeightsError, match="2015-12-05"):
        weights.load({**arrays, "AuxLogits.fc.weight": np.zeros((1000, 768))}, "inception")


@pytest.mark.parametrize("classes", [0, 1])
def test_files_for_fid_alone_have_features_and_no_probabilities(classes, arrays, tmp_path):
    """Without `fc`, or with a single logit in its place."""
    features = {name: value for name, value in arrays.items() if not name.startswith("fc.")}
    stub = {"fc.weight": np.zeros((1, 2048), np.float16), "fc.bias": np.zeros(1, np.float32)} if classes else {}
    model, params = weights.load({**features, **stub}, "inception")
    assert model.num_classes == classes
    assert weights.save(model, params, "inception").keys() == {**features, **stub}.keys()
    np.savez(tmp_path / "fid.npz", **features, **stub)
    net = feature_net("inception", tmp_path / "fid.npz", side=139)
    out = jax.eval_shape(net.apply, GOLDEN["images"])
    assert {name: value.shape for name, value in out.items()} == {"features": (2, 2048), "spatial": (2, 343)}


def test_it_is_not_a_denoiser():
    with pytest.raises(ValueError, match=r"Inception.*load\(\).*edm, edm2, dit, sit, mdt"):
        weights.load_denoiser({}, "inception")


def test_scaling_depends_on_the_protocol():
    pixels = np.array([0, 128, 255], np.uint8)[:, None, None, None] * np.ones((1, 4, 4, 3), np.uint8)
    torch, clean, tensorflow = (preprocess(pixels, kind, 4)[:, 0, 0, 0] for kind in ("bilinear", "clean", "tensorflow"))
    np.testing.assert_allclose(torch, [-1, 128 / 127.5 - 1, 1], atol=1e-6)
    np.testing.assert_allclose(clean, [-1, 0, 127 / 128], atol=1e-6)
    np.testing.assert_allclose(clean, tensorflow)
    assert preprocess(pixels).shape == (3, 299, 299, 3)


def test_too_small_images_are_refused():
    with pytest.raises(ValueError, match="75x75, got 64x64"):
        jax.eval_shape(Inception().init, jax.random.key(0), np.zeros((1, 64, 64, 3), np.float32))
