"""The studies of features run from end to end at tiny size, and fill their tables."""

import numpy as np
import pytest

from experiments.features import labelled


@pytest.mark.slow
def test_profile(run):
    found, text = run("features.profile")
    assert list(found["accuracy"]) == list(found["noise"]) == ["0.05", "0.1"]
    assert found["noise"]["0.05"]["in"]["nsr"] < found["noise"]["0.1"]["in"]["nsr"]
    assert "blocks_1/out" in text and "self_q" in text and "blocks 8x8" in text


@pytest.mark.slow
def test_compare(run):
    found, text = run("features.compare")
    assert found["lists"]["inter-module"]["candidates"] == 2 and set(found["top_ten_kept"]) <= set(found["lists"])
    assert len(found["lists"]["all"]["judged"]) == 2 and found["lists"]["all"]["single"] in found["alone"]
    pck = found["correspondence"]["pck"]
    assert set(pck["warp"]) == {"pixels", *found["alone"]} and all(
        len(halves) == 2 for halves in pck["semantic"].values()
    )
    assert "PCK@0.1, 6 pairs" in text and "of the best ten" in text


@pytest.mark.slow
def test_massive(run):
    found, text = run("features.massive")
    assert list(found["own"]) == ["blocks_0/norm0", "blocks_1/norm0"] and "outlier" in text
    for row in found["planted"].values():
        assert {0, 8} <= set(row["channels"]) and row["outlier"] > 50  # of 16 channels


def test_files_of_real_images(tmp_path):
    """Images, classes of pixels and keypoints of a file whose planes are deltas, shrunk to half the side."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (5, 8, 8, 3), np.uint8)
    red, green, blue = np.moveaxis(images, -1, 0)
    planes = np.stack([green, red - green, blue - green])
    deltas = np.diff(np.diff(planes, axis=2, prepend=np.uint8(0)), axis=3, prepend=np.uint8(0))
    trimap = np.full((5, 8, 8), 2)
    trimap[:, 2:4, 2:4], trimap[:, 4:6, 2:4] = 1, 3
    points = rng.uniform(size=(5, 4, 3))
    points[..., 2] = [1, 1, 0, 1]
    np.savez(tmp_path / "a.npz", images_pd=deltas, trimap=trimap, keypoints=points, labels=np.arange(5))
    found = labelled.read(str(tmp_path / "a.npz"), 0, 4)
    order = found.labels
    means = images[order].reshape(5, 4, 2, 4, 2, 3).mean((2, 4))
    np.testing.assert_allclose(found.images, means / 127.5 - 1, atol=1e-6)
    assert sorted(order) == list(range(5)) and found.classes == 2
    np.testing.assert_array_equal(np.argwhere(found.masks[0]), [[1, 1], [2, 1]])
    np.testing.assert_allclose(found.points, points[order, :, :2] * 4 - 0.5)
    seen = found.points[:, [0, 1, 3]]
    np.testing.assert_allclose(found.boxes, np.concatenate([seen.min(1), seen.max(1)], -1))
    with pytest.raises(SystemExit, match="has 5 images, 9 are needed"):
        labelled.read(str(tmp_path / "a.npz"), 9, 4)
    with pytest.raises(SystemExit, match="8x8 cannot be shrunk to 3x3"):
        labelled.read(str(tmp_path / "a.npz"), 0, 3)
