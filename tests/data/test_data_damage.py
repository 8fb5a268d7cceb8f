"""Files that are too large, vanish, lead nowhere or come twice: reported, skipped within bounds, else refused."""

import json
import os
import zipfile

import numpy as np
import pytest
from image_makers import make_folder
from PIL import Image

from jaxdiff import data, files
from jaxdiff.data import transforms
from jaxdiff.data.transforms import CorruptImage


def load(path, **options):
    """The dataset and what was logged."""
    said = []
    return data.load("folder", path=path, log=said.append, **options), said


# ---------------------------------------------------------------------------------------------- sizes


def test_a_decompression_bomb_is_not_unpacked(tmp_path, monkeypatch):
    """81 million pixels of one colour: a small file, below Pillow's own limits."""
    make_folder(tmp_path, ["0.png", "1.png"])
    Image.new("1", (9000, 9000)).save(tmp_path / "2.png")
    assert (tmp_path / "2.png").stat().st_size < 100_000
    monkeypatch.setattr(transforms, "_pixels", lambda *_: pytest.fail("unpacked"))
    with pytest.raises(CorruptImage, match=r"2\.png: it has 9000 x 9000 pixels, more than max_pixels=67108864"):
        transforms.decode((tmp_path / "2.png").read_bytes(), "2.png")
    monkeypatch.undo()
    dataset, said = load(tmp_path)
    dataset.take(0, 3)
    assert list(dataset.corrupt) == [str(tmp_path / "2.png")] and "max_pixels" in said[0]


@pytest.mark.parametrize("source", ["folder", "array_records"])
def test_the_pixel_limit_is_an_option(tmp_path, source):
    make_folder(tmp_path, ["0.png"], height=12)
    if source == "array_records":
        data.write_array_records(tmp_path / "x.array_record", [{"image": (tmp_path / "0.png").read_bytes()}])
    assert data.load(source, path=tmp_path, max_pixels=12 * 16).shape[:2] == (12, 16)
    with pytest.raises(CorruptImage, match="none of 1 examples"):
        data.load(source, path=tmp_path, max_pixels=12 * 16 - 1)


def test_a_zip_bomb_is_not_unpacked(tmp_path, monkeypatch):
    path = tmp_path / "bomb.npz"
    np.savez_compressed(path, images=np.zeros((1000, 32, 32, 3), np.uint8))
    monkeypatch.setattr(files, "FREE", 2**20)
    assert path.stat().st_size * files.EXPANSION < 1000 * 32 * 32 * 3
    with pytest.raises(ValueError, match=r"bomb\.npz has [\d,]+ bytes and would expand to 3,072,\d+, more than 100"):
        data.load("arrays", images=path)
    monkeypatch.undo()
    assert data.load("arrays", images=path).size == 1000  # small enough whatever its ratio


def damaged_crc(path):
    """One byte of the array changed in a stored archive."""
    content = bytearray(path.read_bytes())
    content[content.index(b"\x07" * 64) + 5] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    "damage",
    [
        damaged_crc,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:100]),
        lambda path: path.write_bytes(b"no zip" * 100),
    ],
)
@pytest.mark.parametrize("source", ["arrays", "latents"])
def test_a_damaged_npz(tmp_path, source, damage):
    path = tmp_path / "x.npz"
    images = np.full((4, 8, 8, 3), 7, np.uint8)
    np.savez(path, images=images, latents=images.astype(np.float32), scale=1.0, shift=0.0)
    damage(path)
    with pytest.raises(ValueError, match=r"x\.npz is damaged"):
        data.load(source, **{"images" if source == "arrays" else "path": path})


def test_objects_are_not_unpickled(tmp_path):
    np.savez(tmp_path / "x.npz", images=np.array([{"a": 1}], dtype=object))
    with pytest.raises(ValueError, match=r"x\.npz holds Python objects, which are not read"):
        data.load("arrays", images=tmp_path / "x.npz")


def test_a_header_that_promises_more_than_the_file_holds(tmp_path):
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (99999999999, 8, 8, 3), }".ljust(117) + b"\n"
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("images.npy", b"\x93NUMPY\x01\x00v\x00" + header + b"\x00" * 64)
    with pytest.raises(ValueError, match=r"x\.npz is damaged"):
        data.load("arrays", images=tmp_path / "x.npz")


def test_floats_of_another_range_in_records(tmp_path):
    bright = np.full((8, 8, 3), 200, np.float32)
    data.write_array_records(tmp_path / "x.array_record", [{"image": bright}])
    with pytest.raises(ValueError, match=r"record 0 of .* has values from 200 to 200; .*x / 127\.5 - 1 for 0\.\.255"):
        data.load("array_records", path=tmp_path)
    data.write_array_records(tmp_path / "x.array_record", [{"image": bright * np.nan}])
    with pytest.raises(ValueError, match=r"record 0 of .* has values from nan to nan; floats must be finite"):
        data.load("array_records", path=tmp_path)


# ---------------------------------------------------------------------------------------------- files and links


def test_an_image_that_vanishes(tmp_path):
    make_folder(tmp_path, [f"{i}.png" for i in range(6)])
    dataset, said = load(tmp_path, shuffle=False)
    (tmp_path / "3.png").unlink()
    batch = dataset.take(0, 6)
    assert batch["image"].shape[0] == 6 and list(dataset.corrupt) == [str(tmp_path / "3.png")]
    assert said == [
        f"cannot read {tmp_path / '3.png'}: No such file or directory; skipped, replaced by another example"
    ]
    strict, _ = load(tmp_path, shuffle=False, on_corrupt="stop")
    (tmp_path / "4.png").unlink()
    with pytest.raises(CorruptImage, match=r"4\.png: No such file"):
        strict.take(0, 5)


def test_a_dangling_link_and_a_loop(tmp_path):
    make_folder(tmp_path, ["a/0.png", "b/0.png"])
    (tmp_path / "a" / "1.png").symlink_to(tmp_path / "gone.png")
    (tmp_path / "a" / "again").symlink_to(tmp_path)
    (tmp_path / "b" / "self.png").symlink_to(tmp_path / "b" / "self.png")
    dataset, said = load(tmp_path)
    assert dataset.size == 2 and dataset.class_names == ("a", "b")
    assert [str(tmp_path / "a" / "1.png") in said[0], str(tmp_path / "a" / "again") in said[1]] == [True, True]
    assert "self.png" in said[2] and all(text.endswith("skipped") for text in said)
    with pytest.raises(CorruptImage, match=r"1\.png.*on_corrupt='skip'"):
        load(tmp_path, on_corrupt="stop")


def test_too_many_of_them(tmp_path):
    make_folder(tmp_path, [f"{i:02d}.png" for i in range(20)])
    for i in range(11):
        (tmp_path / f"link{i}.png").symlink_to("nowhere.png")
    with pytest.raises(CorruptImage, match=r"11 of 31 examples of 'folder/.*more than max_corrupt=0\.1"):
        load(tmp_path)
    assert load(tmp_path, max_corrupt=0.5)[0].size == 20
    for path in tmp_path.glob("link*"):
        path.unlink()
    dataset, _ = load(tmp_path)
    for i in range(11):
        (tmp_path / f"{i:02d}.png").write_bytes(b"broken")
    with pytest.raises(CorruptImage, match=r"11 of 20 examples"):
        dataset.take(0, 20)


def test_a_folder_that_may_not_be_listed(tmp_path, monkeypatch):
    make_folder(tmp_path, ["a/0.png", "b/0.png"])
    scan = os.scandir

    def refused(folder):
        if os.path.basename(folder) == "b":  # the mode of a folder does not stop root
            raise PermissionError(13, "Permission denied")
        return scan(folder)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(OSError, match=r"cannot list the image folder .*b: Permission denied"):
        load(tmp_path)


def test_empty_class_folders_are_reported(tmp_path):
    make_folder(tmp_path, ["a/0.png", "b/0.png"])
    (tmp_path / "c").mkdir()
    (tmp_path / ".hidden").mkdir()
    dataset, said = load(tmp_path)
    assert dataset.num_classes == 2 and said == [f"1 folders of {tmp_path} have no images and are no classes: c"]


@pytest.mark.parametrize("name", ["captions.csv", "captions.json"])
def test_captions_given_twice_are_reported(tmp_path, name):
    make_folder(tmp_path, ["0.png", "1.png"])
    rows = [("0.png", "a dog"), ("1.png", "a cat"), ("0.png", "a fox")]
    content = "".join(f"{file},{text}\n" for file, text in rows)
    if name.endswith("json"):
        content = "{" + ", ".join(f"{json.dumps(file)}: {json.dumps(text)}" for file, text in rows) + "}"
    (tmp_path / name).write_text(content)
    dataset, said = load(tmp_path)
    assert set(dataset.captions) == {"a fox", "a cat"}
    assert said == [f"{tmp_path / name} has several captions for 1 files, the last is used: 0.png"]


@pytest.mark.parametrize(("name", "content"), [("captions.json", b"{"), ("captions.csv", b"0.png,\xff\xfe\n")])
def test_captions_that_cannot_be_read(tmp_path, name, content):
    make_folder(tmp_path, ["0.png"])
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name} is not"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_corrupt": -0.1}, r"max_corrupt .* in \[0, 1\], got -0\.1"),
        ({"max_corrupt": float("nan")}, "max_corrupt"),
        ({"augment": float("nan")}, "augment is the probability"),
        ({"local_share": float("nan")}, "local_share"),
    ],
)
def test_options_of_the_wrong_kind(options, message):
    with pytest.raises(ValueError, match=message):
        data.load("digits", **options)
