"""Crops, flips, resizing and decoding: pixels follow from the recorded metadata alone."""

import numpy as np
import pytest
from image_makers import encoded, make_folder, random_image, saved
from PIL import Image

from jaxdiff import data
from jaxdiff.conditions import CONTROLS
from jaxdiff.data import transforms
from jaxdiff.data.transforms import Transform, apply, decode, resize, to_channels


@pytest.mark.parametrize("crop", ["center", "global", "random", "local", "mixed"])
@pytest.mark.parametrize(("height", "width"), [(12, 20), (20, 12), (16, 16)])
def test_window_is_rebuilt_from_its_record(crop, height, width):
    image = random_image(0, height, width)
    sizes, flips = set(), set()
    for seed in range(30):
        window, record = apply(Transform(8, crop, flip=True), image, np.random.default_rng(seed), "it")
        source = resize(image, record["resized_size"])
        top, left = record["crop"]
        expected = source[top : top + 8, left : left + 8]
        assert np.array_equal(window[:, ::-1] if record["flip"][0] else window, expected)
        assert record["original_size"] == (height, width)
        assert record["aspect"] == (width / height,)
        sizes.add(record["resized_size"])
        flips.add(record["flip"][0])
    shrunk = (
        8 * height // min(height, width) if height > width else 8,
        round(8 * width / min(height, width)) if width > height else 8,
    )
    assert sizes == {"local": {(height, width)}, "mixed": {(height, width), shrunk}}.get(crop, {shrunk})
    assert flips == {0.0, 1.0}


def test_record_in_batches_belongs_to_their_images(tmp_path):
    """End to end: undo flip and crop of every window of a folder of different sizes and compare with the file."""
    for i in range(6):
        make_folder(tmp_path, ["x.png"], height=9 + i, width=14 - i)
        (tmp_path / "x.png").rename(tmp_path / f"{i}.png")
    dataset = data.load(
        "folder", path=tmp_path, image_size=8, crop="mixed", flip=True, control=tuple(CONTROLS), shuffle=False
    )
    batch = dataset.batch(0, 24)
    for i in range(24):
        control = {key: tuple(int(v) for v in batch[key][i]) for key in CONTROLS}
        assert control["original_size"] == (9 + i % 6, 14 - i % 6)
        assert batch["aspect"][i, 0] == np.float32((14 - i % 6) / (9 + i % 6))
        (top, left), (flip,) = control["crop"], control["flip"]
        window = batch["image"][i][:, ::-1] if flip else batch["image"][i]
        whole = resize(random_image(0, *control["original_size"]), control["resized_size"])
        assert np.array_equal(window, whole[top : top + 8, left : left + 8] / np.float32(127.5) - 1)


def test_flip_in_memory_is_recorded():
    images = np.stack([random_image(i, 4, 4) for i in range(10)])
    dataset = data.load(
        "arrays", images=images, flip=True, control=("flip", "original_size", "crop", "aspect"), shuffle=False
    )
    assert dataset.in_memory
    batch = dataset.batch(0, 40)
    flip = batch["flip"][:, 0].astype(bool)
    assert 5 < flip.sum() < 35
    upright = np.where(flip[:, None, None, None], batch["image"][:, :, ::-1], batch["image"])
    assert np.array_equal(upright, np.tile(images, (4, 1, 1, 1)) / np.float32(127.5) - 1)
    assert (batch["original_size"] == 4).all()
    assert (batch["crop"] == 0).all()
    assert np.array_equal(
        images, np.stack([random_image(i, 4, 4) for i in range(10)])
    )  # the stored images stay as they were


def test_mixed_takes_its_share_of_local_windows():
    image = random_image(0, 16, 16)
    records = [
        apply(Transform(8, "mixed", local_share=0.25), image, np.random.default_rng(i), "it")[1] for i in range(200)
    ]
    assert 0.13 < np.mean([record["resized_size"] == (16, 16) for record in records]) < 0.37


def test_random_windows_reach_every_place():
    corners = {
        apply(Transform(3, "local"), random_image(0, 5, 4), np.random.default_rng(i), "it")[1]["crop"]
        for i in range(200)
    }
    assert corners == {(top, left) for top in range(3) for left in range(2)}


@pytest.mark.parametrize("resample", list(transforms.RESAMPLE))
def test_resizing_keeps_constants_and_means(resample):
    flat = np.full((12, 18, 3), 77, np.uint8)
    assert (resize(flat, (4, 6), resample) == 77).all()
    smooth = np.linspace(-0.8, 0.8, 12 * 18, dtype=np.float32).reshape(12, 18, 1)
    assert np.abs(resize(smooth, (4, 6), resample).mean() - smooth.mean()) < 1e-5


def test_area_is_the_block_mean_for_floats_and_bytes():
    image = random_image(0, 12, 18)
    blocks = image.reshape(4, 3, 6, 3, 3).mean(axis=(1, 3))
    assert np.abs(resize(image, (4, 6), "area") - blocks).max() <= 1  # Pillow rounds rows and columns in turn
    floats = (image / 127.5 - 1).astype(np.float32)
    assert np.abs(resize(floats, (4, 6), "area") - (blocks / 127.5 - 1)).max() < 1e-6


def test_overshoot_of_floats_is_clipped():
    step = np.where(np.arange(16) < 8, -1, 1).astype(np.float32)[None, :, None].repeat(16, 0)
    enlarged = resize(step, (40, 40), "lanczos")
    assert enlarged.min() == -1
    assert enlarged.max() == 1


def test_digits_can_be_enlarged():
    batch = data.load("digits", image_size=16, control="original_size").batch(0, 4)
    assert batch["image"].shape == (4, 16, 16, 1)
    assert np.array_equal(batch["original_size"], np.full((4, 2), 8))


def test_grey_and_colour():
    colour, grey = random_image(0), random_image(1, channels=1)
    assert np.array_equal(to_channels(grey, 3, "it"), np.concatenate([grey] * 3, -1))
    luma = np.asarray(Image.fromarray(colour).convert("L"))
    assert np.abs(to_channels(colour, 1, "it")[..., 0].astype(int) - luma).max() <= 1
    floats = to_channels((colour / 127.5 - 1).astype(np.float32), 1, "it")
    assert np.abs(floats[..., 0] - (luma / 127.5 - 1)).max() < 1.01 / 127.5
    with pytest.raises(ValueError, match=r"it has 4 channels.*3"):
        to_channels(np.zeros((2, 2, 4), np.uint8), 3, "it")


# ---------------------------------------------------------------------------------------------- decoding


@pytest.mark.parametrize("channels", [1, 3])
def test_decoding_gives_the_stored_pixels(channels):
    assert np.array_equal(decode(encoded(random_image(0, channels=channels)), "it"), random_image(0, channels=channels))


def test_sixteen_bits_are_scaled_not_clipped():
    assert np.array_equal(
        decode(encoded(np.array([[0, 255, 256, 65535]], np.uint16)[..., None]), "it")[0, :, 0], [0, 0, 1, 255]
    )


def test_transparency_is_laid_over_white():
    pixels = np.zeros((1, 3, 4), np.uint8)
    pixels[0, :, 3] = (0, 128, 255)
    assert np.abs(decode(encoded(pixels), "it")[0, :, 0].astype(int) - [255, 127, 0]).max() <= 1


def test_palette_images_become_colour():
    image = Image.fromarray(np.full((4, 4, 3), (255, 0, 0), np.uint8)).convert("P")
    assert (decode(saved(image), "it") == (255, 0, 0)).all()


def test_camera_rotation_is_undone():
    image = Image.fromarray(random_image(0, 6, 4))
    exif = image.getexif()
    exif[0x0112] = 6  # "rotate by 90 degrees clockwise to show"
    assert np.array_equal(decode(saved(image, exif=exif), "it"), np.rot90(random_image(0, 6, 4), -1))


@pytest.mark.parametrize("cut", [0, 10, 60, 150])
def test_broken_bytes_are_corrupt_images(cut):
    whole = encoded(random_image(0))
    with pytest.raises(data.CorruptImage, match=rf"it \({cut} bytes\)"):
        decode(whole[:cut], "it")


def test_images_without_a_range_are_refused():
    with pytest.raises(data.CorruptImage, match="mode 'F'"):
        decode(encoded(np.zeros((4, 4, 1), np.float32), "TIFF"), "it")
