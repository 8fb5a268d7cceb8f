"""Creatures: annotations match the image."""

import numpy as np
import pytest

from jaxdiff import data
from jaxdiff.data import creatures as lib


@pytest.fixture(scope="module")
def made():
    return data.creature_set(60, 32)


def test_images_depend_on_draw_and_index_alone(made):
    few = data.creature_set(3, 32)
    for whole, part in zip(made, few, strict=True):
        np.testing.assert_array_equal(whole[:3], part)
    assert np.abs(data.creature_set(3, 32, draw=1).images - few.images).max() > 0.1
    assert made.images.shape == (60, 32, 32, 3) and made.images.dtype == np.float32 and np.abs(made.images).max() <= 1


def test_keypoints_lie_on_their_parts(made):
    """Where a limb is thinner than a pixel or hidden, the part is next to the point."""
    place = np.round(made.keypoints).astype(int)
    for k, part in enumerate(["head", "body", None, "tail", "legs", "legs"]):
        for i in range(60):
            x, y = place[i, k]
            around = made.parts[i, max(y - 1, 0) : y + 2, max(x - 1, 0) : x + 2]
            assert part is None or lib.PARTS.index(part) in around, (i, lib.KEYPOINTS[k])


def test_boxes_hold_the_creature_and_no_more(made):
    for parts, (left, top, right, bottom) in zip(made.parts, made.boxes.astype(int), strict=True):
        rows, columns = np.nonzero(parts)
        assert (rows.min(), rows.max(), columns.min(), columns.max()) == (top, bottom, left, right)


def test_species_tell_legs_and_body(made):
    for parts, label, foot in zip(made.parts, made.labels, made.keypoints[:, 4, 1], strict=True):
        feet = (parts[int(foot - 1)] == 2).astype(int)
        legs = (np.diff(feet, prepend=0) == 1).sum()
        rows, columns = np.nonzero(parts == 1)
        long = (np.ptp(columns) + 1) / (np.ptp(rows) + 1) > 1.7
        assert lib.SPECIES[label].startswith("long" if long else "round")
        assert legs == 2 if "biped" in lib.SPECIES[label] else legs in (2, 3, 4)  # close ones touch
    assert set(made.labels) == {0, 1, 2, 3}


def test_a_creature_has_one_colour_and_both_directions(made):
    shifted = [np.roll(made.parts == 1, (dy, dx), (1, 2)) for dy in (-1, 0, 1) for dx in (-1, 0, 1)]  # within the body
    for image, mask in zip(made.images, np.all(shifted, axis=0), strict=True):
        assert np.ptp(image[mask], axis=0).max() < 1e-5
    facing = made.keypoints[:, 0, 0] > made.keypoints[:, 1, 0]
    assert 15 < facing.sum() < 45


def test_creatures_are_a_data_source():
    dataset = data.load("creatures", count=8, size=16)
    batch = dataset.batch(0, 4)
    assert batch["image"].shape == (4, 16, 16, 3) and batch["label"].max() < 4
    with pytest.raises(ValueError, match=r"size >= 8.*count=1, size=4"):
        data.creature_set(1, 4)
