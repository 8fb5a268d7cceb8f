"""Rendered shapes: what captions and labels say is what a reader of the images sees; captions as conditions."""

import numpy as np
import pytest

from jaxdiff import data
from jaxdiff.data import shapes as lib

PROMPT = "a red circle left of a blue square"


def render(count, size, **options):
    made = lib.shape_set(count, size, **options)
    return np.stack(made.images).astype(np.float32) / 127.5 - 1, made


@pytest.mark.parametrize("size", [8, 16, 32])
def test_attributes_are_read_back(size):
    images, made = render(200, size)
    captions = [lib.CAPTIONS[i] for i in made.captions]
    np.testing.assert_array_equal(data.read_shapes(images), [lib.PAIRS[pair] for pair in made.pairs])
    scores = data.caption_scores(images, captions)
    assert scores == {"colour": 1.0, "shape": 1.0, "caption": 1.0, "left_right": 1.0}


def test_reading_survives_noise_and_blur():
    images, made = render(200, 32)
    captions = [lib.CAPTIONS[i] for i in made.captions]
    noisy = images + np.float32(0.3) * np.random.default_rng(0).normal(size=images.shape).astype(np.float32)
    soft = (images + np.roll(images, 1, 1) + np.roll(images, 1, 2) + np.roll(images, (1, 1), (1, 2))) / 4
    assert data.caption_scores(noisy, captions)["caption"] > 0.95
    assert data.caption_scores(soft, captions)["caption"] > 0.95


def test_mirrored_images_disobey_and_noise_is_chance():
    images, made = render(400, 16)
    captions = [lib.CAPTIONS[i] for i in made.captions]
    mirrored = data.caption_scores(np.ascontiguousarray(images[:, :, ::-1]), captions)
    assert mirrored["left_right"] == 0 and mirrored["caption"] == 0
    other = [*captions[1:], captions[0]]
    assert abs(data.caption_scores(images, other)["left_right"] - 0.5) < 0.1
    assert data.caption_scores(images, other)["colour"] < 0.4


def test_images_depend_on_draw_index_and_size_alone():
    few, many = lib.shape_set(3, 16), lib.shape_set(9, 16)
    for a, b in zip(few.images, many.images[:3], strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(lib.shape_set(9, 32).captions, many.captions)
    assert (lib.shape_set(9, 16, draw=1).captions != many.captions).any()
    assert {image.shape for image in lib.shape_set(4, (16, 32)).images} == {(16, 16, 3), (32, 32, 3)}


def test_captions_are_parsed_and_refused():
    left, right = lib.THINGS.index("red circle"), lib.THINGS.index("blue square")
    assert lib.parse_caption(PROMPT) == lib.parse_caption("A blue square right of a red circle") == (left, right)
    for i, caption in enumerate(lib.CAPTIONS):
        assert lib.parse_caption(caption) == lib.PAIRS[i // 2]
    for wrong in ("a dog", "a red dog left of a blue square", ""):
        with pytest.raises(ValueError, match=r"'a red circle left of a blue square'"):
            lib.parse_caption(wrong)
    for options in ({"count": 0}, {"count": 3, "size": 7}, {"count": 3, "size": ()}):
        with pytest.raises(ValueError, match=r"even sizes.*8"):
            lib.shape_set(**options)


def test_wordings_and_things_are_chosen():
    things = ("red circle", "green square", "blue circle")
    images, made = render(60, 16, wordings=("left",), things=things)
    captions = [lib.CAPTIONS[i] for i in made.captions]
    assert all(" left of " in caption for caption in captions) and len(set(captions)) == 6
    assert {lib.THINGS[thing] for pair in data.read_shapes(images) for thing in pair} == set(things)
    assert data.caption_scores(images, captions)["caption"] == 1
    often = lib.shape_set(300, 8, wordings=("left", "left", "right"))
    assert 0.25 < (often.captions % 2).mean() < 0.42
    with pytest.raises(ValueError, match=r"left, right, got \('above',\)"):
        lib.shape_set(3, 8, wordings=("above",))
    with pytest.raises(ValueError, match=r"red circle, .*yellow triangle, got \('red circle',\)"):
        lib.shape_set(3, 8, things=("red circle",))


# ------------------------------------------------------------------------------------ as a data set


def test_captions_become_conditions():
    made = data.load("shapes", count=50, size=8, caption_text=(12, 16))
    batch = made.take(0, 6)
    captions = [made.captions[i] for i in batch["caption_id"]]
    wanted = data.hashed_text(captions, 12, 16)
    for name in ("text", "text_mask", "pooled"):
        np.testing.assert_array_equal(batch[name], wanted[name])
        np.testing.assert_array_equal(made.text(captions)[name], wanted[name])
        np.testing.assert_array_equal(made.signals[name].null, data.hashed_text([""], 12, 16)[name][0])
    assert made.num_classes == len(lib.PAIRS)
    assert [lib.parse_caption(made.class_names[i]) for i in batch["label"]] == [lib.parse_caption(c) for c in captions]
    assert made.judge(batch["image"], captions)["caption"] == 1


def test_stored_embeddings_of_captions(tmp_path):
    table = np.random.default_rng(0).normal(size=(len(lib.CAPTIONS) + 1, 3, 4)).astype(np.float16)
    np.save(tmp_path / "text.npy", table)
    made = data.load("shapes", count=5, size=8, caption_text=str(tmp_path))
    batch = made.take(0, 5)
    np.testing.assert_array_equal(batch["text"], table[batch["caption_id"]].astype(np.float32))
    np.testing.assert_array_equal(made.signals["text"].null, table[-1])
    np.testing.assert_array_equal(made.text([lib.CAPTIONS[7], ""])["text"], table[[7, -1]])
    with pytest.raises(ValueError, match=r"'a red circle left of a blue squar'.*did you mean '"):
        made.text(["a red circle left of a blue squar"])
    np.save(tmp_path / "text.npy", table[1:])
    with pytest.raises(ValueError, match=r"264 rows.*264 captions"):
        data.load("shapes", count=5, size=8, caption_text=str(tmp_path))
    with pytest.raises(ValueError, match=r"caption_text.*captions"):
        data.load("digits", caption_text=(4, 8))
    with pytest.raises(ValueError, match=r"caption_text.*\(length, width\).*\(4,\)"):
        data.load("shapes", count=5, size=8, caption_text=(4,))


@pytest.mark.parametrize("stored", [True, False])
def test_the_mean_of_a_text_is_what_is_pooled(tmp_path, stored):
    rng = np.random.default_rng(0)
    table, counts = rng.normal(size=(len(lib.CAPTIONS) + 1, 3, 4)), rng.integers(1, 4, len(lib.CAPTIONS) + 1)
    np.save(tmp_path / "text.npy", table.astype(np.float16))
    np.save(tmp_path / "text_mask.npy", np.arange(3) < counts[:, None])
    how = str(tmp_path) if stored else (12, 4)
    made = data.load("shapes", count=5, size=8, caption_text=how, pooling="mean")
    batch = made.take(0, 5)
    for rows in (batch, made.text([made.captions[i] for i in batch["caption_id"]])):
        wanted = [text[mask].mean(0) for text, mask in zip(rows["text"], rows["text_mask"], strict=True)]
        np.testing.assert_allclose(rows["pooled"], wanted, rtol=1e-5, atol=1e-6)
    null = {name: made.signals[name].null for name in ("text", "text_mask", "pooled")}
    np.testing.assert_allclose(null["pooled"], null["text"][null["text_mask"]].mean(0), rtol=1e-5, atol=1e-6)


def test_poolings_that_cannot_be():
    with pytest.raises(ValueError, match=r"'men'.*did you mean 'mean'"):
        data.load("shapes", count=5, size=8, caption_text=(4, 8), pooling="men")
    with pytest.raises(ValueError, match=r"pooling='mean'.*caption_text"):
        data.load("shapes", count=5, size=8, pooling="mean")


def test_flips_are_recorded_or_not():
    """With the record, mirroring the flipped ones back gives images that obey; without it about half disobey."""
    made = data.load("shapes", count=300, size=16, flip=True, control=("flip",))
    batch = made.take(0, 300)
    captions = [made.captions[i] for i in batch["caption_id"]]
    flipped = batch["flip"][:, 0] == 1
    assert 0.4 < flipped.mean() < 0.6
    assert made.judge(batch["image"], captions)["left_right"] == pytest.approx(1 - flipped.mean())
    back = np.where(flipped[:, None, None, None], batch["image"][:, :, ::-1], batch["image"])
    assert made.judge(back, captions)["left_right"] == 1
    assert "flip" not in data.load("shapes", count=9, size=16, flip=True).take(0, 9)


def test_crops_and_sizes_are_recorded():
    """A local window of a large image is that image at its corner; global ones are whole, and so is their size."""
    options = {"count": 24, "size": 32, "image_size": 16, "control": ("crop", "original_size", "resized_size")}
    whole = data.load("shapes", count=24, size=32, shuffle=False).take(0, 24)["image"]
    local = data.load("shapes", **options, crop="local", shuffle=False).take(0, 24)
    for i, (top, left) in enumerate(local["crop"].astype(int)):
        np.testing.assert_array_equal(local["image"][i], whole[i, top : top + 16, left : left + 16])
    assert (local["resized_size"] == 32).all() and np.ptp(local["crop"]) > 4
    mixed = data.load("shapes", **options, crop="mixed", local_share=0.25).take(0, 200)
    assert 0.15 < (mixed["resized_size"] == 32).all(1).mean() < 0.35
    options = {"count": 6, "size": (16, 32), "image_size": 16, "shuffle": False}
    sizes = data.load("shapes", **options, caption_text=(12, 8), control=("original_size",)).take(0, 6)
    np.testing.assert_array_equal(sizes["original_size"][:, 0], [16, 32] * 3)
    assert sizes["image"].shape == (6, 16, 16, 3) and sizes["text"].shape == (6, 12, 8)
