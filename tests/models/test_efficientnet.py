"""EfficientNet-Lite0 against a PyTorch program with the same seeded weights."""

import runpy
from pathlib import Path

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from jaxdiff import weights
from jaxdiff.models.efficientnet import EfficientNetLite0, preprocess

FOLDER = Path(__file__).parents[1] / "golden"
GOLDEN = np.load(FOLDER / "efficientnet_lite0.npz")
draw = runpy.run_path(str(FOLDER / "seeded.py"))["draw"]


@pytest.fixture(scope="module")
def arrays():
    images = np.zeros((1, 32, 32, 3), np.float32)
    abstract = jax.eval_shape(EfficientNetLite0().init, jax.random.key(0), images)["params"]
    return {(name := ".".join(path)): draw(name, leaf.shape) for path, leaf in flatten_dict(abstract).items()}


def test_features_and_logits_agree_with_torch(arrays):
    model, params = weights.load(arrays, "efficientnet_lite0")
    side = int(GOLDEN["side"])
    out = jax.jit(lambda params, x: model.apply({"params": params}, preprocess(x, side=side)))(params, GOLDEN["images"])
    for name, ours in out.items():
        assert np.abs(ours - GOLDEN[name]).max() <= 1e-5 * np.abs(GOLDEN[name]).max(), name


def test_round_trip_and_half_precision_files(arrays, tmp_path):
    half = {name: value.astype(np.float16) if name.endswith("kernel") else value for name, value in arrays.items()}
    model, params = weights.load(half, "efficientnet_lite0")
    saved = weights.save(model, params, "efficientnet_lite0", tmp_path / "lite0.npz")
    assert set(saved) == set(half)
    assert all(value.dtype == np.float32 and (value == half[name]).all() for name, value in saved.items())
    read = weights.files.read(tmp_path / "lite0.npz")
    assert all((read[name] == value).all() for name, value in saved.items())
    assert sum(value.size for value in saved.values()) == 4_652_008 - 21_008  # one bias for each scale and shift folded


def test_strict(arrays):
    wrong = {name: value for name, value in arrays.items() if name != "block3.expand.bias"}
    with pytest.raises(weights.WeightsError, match=r"1 missing \(block3.expand.bias\)"):
        weights.load(wrong, "efficientnet_lite0")
    with pytest.raises(weights.WeightsError, match=r"no 'fc\.bias'"):
        weights.load({"x": np.zeros(1)}, "efficientnet_lite0")
