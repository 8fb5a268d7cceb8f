"""EfficientNet-Lite0 against a PyTorch program with the same seeded weights, and on real photos if at hand."""

import runpy
from pathlib import Path

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from jaxdiff import weights
from jaxdiff.evaluation import EfficientNetLite0, extract, feature_net, frechet_distance
from jaxdiff.evaluation.efficientnet import preprocess

FOLDER = Path(__file__).parents[1] / "golden"
DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
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


def cifar(count):
    """The first images of the test set and their labels; stored as differences of planes, see the data's README."""
    with np.load(DATA / "cifar10_test.npz", allow_pickle=False) as file:
        planes = file["images_pd"][:, :count].cumsum(2, dtype=np.uint8).cumsum(3, dtype=np.uint8)
        labels = file["labels"][:count]
    green = planes[0]
    return np.stack([planes[1] + green, green, planes[2] + green], axis=-1), labels


@pytest.mark.slow
@pytest.mark.skipif(not (DATA / "efficientnet_lite0.npz").is_file(), reason="needs ../shared/data")
def test_real_features_order_real_blurred_and_noisy_photos():
    net = feature_net("efficientnet_lite0", DATA / "efficientnet_lite0.npz", side=96)
    assert (net.sha256[:8], net.resize) == ("7cf5a61e", "bilinear-96")
    images, labels = cifar(240)
    x, y = np.split(images.astype(np.float32) / 127.5 - 1, 2)
    blurred = sum(np.roll(y, (i, j), (1, 2)) for i in (-1, 0, 1) for j in (-1, 0, 1)) / 9
    noisy = y + 0.5 * np.random.default_rng(0).standard_normal(y.shape, np.float32)
    sets = [extract(net, np.split(part, 3), keep=True) for part in (x, y, blurred, noisy)]
    axes = np.linalg.svd(sets[0].features - sets[0].moments.mean, full_matrices=False)[2]
    half, *others = (part.features @ axes[:16].T for part in sets)  # 120 images tell no more directions
    distances = [frechet_distance(half, other) for other in others]
    assert distances[0] * 1.5 < distances[1] < distances[2]
    nearest = np.linalg.norm(sets[0].features[:, None] - sets[1].features, axis=-1).argmin(0)
    assert (labels[:120][nearest] == labels[120:]).mean() > 0.3  # chance is 0.1
