"""Messages: what was given, what is allowed, what to change, before anything is computed."""

import re

import numpy as np
import pytest
from picture_makers import make_folder, picture

from jaxdiff import data

IMAGES = np.zeros((4, 6, 8, 3), np.uint8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"source": "digts"},
            "unknown data source 'digts' (did you mean 'digits'?); choose one of digits, arrays, folder",
        ),
        (
            {"flop": True},
            "unknown option 'flop' of data source 'digits' (did you mean 'flip'?); it takes split; every source takes seed",
        ),
        ({"source": "folder"}, "data source 'folder' needs the option 'path'"),
        ({"split": "valid"}, "unknown split of the digits 'valid'; choose one of all, train, test"),
        ({"seed": -1}, "seed must be in [0, 2**32), got -1"),
        ({"crop": "center"}, "crop='center' needs image_size"),
        ({"crop": "centre", "image_size": 8}, "unknown crop 'centre' (did you mean 'center'?)"),
        ({"image_size": 0}, "image_size must be a positive number of pixels, got 0"),
        ({"local_share": 1.5, "crop": "mixed", "image_size": 8}, "local_share is a probability, got 1.5"),
        ({"channels": 2}, "channels must be 1 (grey), 3 (RGB) or None (as stored), got 2"),
        ({"resample": "cubic"}, "unknown resample filter 'cubic' (did you mean 'bicubic'?)"),
        ({"control": ("crop", "flipped")}, "unknown control 'flipped' (did you mean 'flip'?)"),
        ({"on_corrupt": "ignore"}, "unknown on_corrupt policy 'ignore'; choose one of skip, stop"),
        (
            {"crop": "local", "image_size": 9},
            "example 0 of digits is 8 x 8 pixels (height x width), too small for a local crop of 9",
        ),
        ({"source": "mixture", "flip": True}, "'mixture/grid' holds points of shape (2,), not pictures"),
        ({"source": "mixture", "preset": "rings"}, "unknown mixture preset 'rings' (did you mean 'ring'?)"),
        ({"source": "mixture", "dim": 9}, "mixture preset 'grid' exists in 1 to 5 dimensions, got dim=9"),
        (
            {"source": "mixture", "std": [1, 2, 3], "means": [[0, 0]]},
            "a mixture of 1 components needs 1 weights and stds",
        ),
        ({"source": "mixture", "means": [0, 1]}, "a mixture needs means of shape [k d]"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        data.load(options.pop("source", "digits"), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"images": IMAGES[:0]}, "dataset 'arrays' has no examples"),
        ({"images": IMAGES, "labels": [0, 1, 2]}, "4 images need 4 integer labels, got shape (3,)"),
        ({"images": IMAGES, "labels": [0.0] * 4}, "4 images need 4 integer labels, got shape (4,) of float64"),
        (
            {"images": IMAGES, "labels": [0, 3, -1, 2], "num_classes": 3},
            "example 1 of arrays (and 1 more) has label 3, but labels of 3 classes lie in [0, 3); correct the label or num_classes",
        ),
        ({"images": IMAGES, "labels": [0, 1, 2, 3], "class_names": ["a", "b"]}, "labels of 2 classes"),
        (
            {"images": IMAGES, "caption_ids": [0, 1, 2, 0], "captions": ["a", "b"]},
            "has caption id 2, but there are 2 captions",
        ),
        ({"images": IMAGES[0, 0]}, "images must have shape [n h w c] or [n h w], got (8, 3)"),
        ({"images": IMAGES.astype(np.int64)}, "images must be uint8 (0..255) or float in [-1, 1], got int64"),
        (
            {"images": np.full((1, 2, 2, 1), 255.0)},
            "float images must lie in [-1, 1], got values from 0 to 255; use x / 127.5 - 1",
        ),
        ({"images": np.full((1, 2, 2, 1), np.nan)}, "float images must lie in [-1, 1]"),
        ({"images": "x.npz", "labels": [0]}, "inside the .npz file"),
    ],
)
def test_wrong_arrays(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        data.load("arrays", **options)


@pytest.mark.parametrize(("source", "option"), [("folder", "path"), ("arrays", "images"), ("array_records", "path")])
def test_missing_files_name_the_path_tried(tmp_path, monkeypatch, source, option):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=re.escape(f"no/such; tried {tmp_path / 'no' / 'such'}")):
        data.load(source, **{option: "no/such"})


def test_empty_places(tmp_path):
    (tmp_path / "x.txt").write_text("")
    with pytest.raises(
        ValueError,
        match=re.escape(f"no pictures in {tmp_path} or its sub-folders; looked for files ending in .png .jpg"),
    ):
        data.load("folder", path=tmp_path)
    with pytest.raises(FileNotFoundError, match=re.escape(f"no *.array_record files in {tmp_path}")):
        data.load("array_records", path=tmp_path)
    data.write_array_records(tmp_path / "x.array_record", [])
    with pytest.raises(ValueError, match=re.escape("dataset 'array_records/x.array_record' has no examples")):
        data.load("array_records", path=tmp_path)


def test_npz_without_images(tmp_path):
    np.savez(tmp_path / "x.npz", pictures=IMAGES)
    with pytest.raises(ValueError, match="has keys pictures, but 'images' is needed"):
        data.load("arrays", images=str(tmp_path / "x.npz"))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ((0, 10, 0, 4), "a batch of 10 cannot be split over 4 processes; the nearest batch size that can is 8"),
        ((0, 3, 0, 8), "a batch of 3 cannot be split over 8 processes; the nearest batch size that can is 8"),
        ((0, 8, 2, 2), "process_index must be in [0, process_count), got 2 of 2"),
        ((-1, 8), "step must be >= 0 and batch_size >= 1, got step -1"),
        ((0, 0), "got step 0 and batch_size 0"),
    ],
)
def test_wrong_batches(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        data.load("digits").batch(*call)


def test_wrong_positions():
    with pytest.raises(ValueError, match=re.escape("0 <= start < stop, got 3 .. 3")):
        data.load("digits").take(3, 3)


# ---------------------------------------------------------------------------------------------- folders and records


def test_pictures_of_different_sizes(tmp_path):
    make_folder(tmp_path, ["0.png"])
    make_folder(tmp_path, ["1.png"], height=9)
    with pytest.raises(
        ValueError,
        match=r"1\.png has shape \(9, 16, 3\) where the first example .* has \(12, 16, 3\); set image_size= ",
    ):
        data.load("folder", path=tmp_path).batch(0, 2)


def test_picture_too_small_for_a_window_is_named(tmp_path):
    make_folder(tmp_path, ["0.png"])
    make_folder(tmp_path, ["1.png"], height=9)
    dataset = data.load("folder", path=tmp_path, image_size=10, crop="local")
    with pytest.raises(
        ValueError, match=r"1\.png is 9 x 16 pixels .* too small for a local crop of 10; use crop='global'"
    ):
        dataset.batch(0, 2)


def test_pictures_beside_class_folders(tmp_path):
    make_folder(tmp_path, ["a/0.png", "b/0.png", "stray.png"])
    with pytest.raises(
        ValueError, match=r"has pictures of its own \('stray\.png' and 0 more\) beside class folders; move them"
    ):
        data.load("folder", path=tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("captions.json", '{"0.png": "x"}', "has no caption for 2 of 3 pictures: 1.png, 2.png"),
        ("captions.json", '["x"]', "must hold one object that maps file names to caption strings"),
        ("captions.csv", "0.png,a dog, running\n", "row 1 of"),
        ("captions.csv", "0.png,a dog, running\n", "has 3 fields, not file and caption; quote captions"),
    ],
)
def test_wrong_captions(tmp_path, name, content, message):
    make_folder(tmp_path, ["0.png", "1.png", "2.png"])
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=re.escape(message)):
        data.load("folder", path=tmp_path)


def test_captions_of_the_wrong_kind_or_place(tmp_path):
    make_folder(tmp_path, ["0.png"])
    with pytest.raises(FileNotFoundError, match=r"no captions file at .*gone\.json; tried"):
        data.load("folder", path=tmp_path, captions=tmp_path / "gone.json")
    with pytest.raises(ValueError, match=r"captions must be a \.json, \.csv or \.tsv file, got '0\.png'"):
        data.load("folder", path=tmp_path, captions=tmp_path / "0.png")


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([{"image": picture(0), "label": 1}], "example 0 has a label: say num_classes= or class_names="),
        (
            [{"image": picture(0)}, {"image": picture(0), "label": 1}],
            "example 1 has keys ['image', 'label']; all need 'image'",
        ),
        ([{"picture": picture(0)}], "example 0 has keys ['picture']"),
        (
            [{"image": picture(0)[0]}],
            "example 0 has an image of shape (16, 3) and uint8; store uint8 or float32 [h w c]",
        ),
        ([{"image": picture(0).astype(np.float64)}], "and float64; store uint8 or float32"),
    ],
)
def test_wrong_records_are_not_written(tmp_path, examples, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        data.write_array_records(tmp_path / "x.array_record", examples)
    assert not list(tmp_path.iterdir())


def test_wrong_labels_and_names_of_records(tmp_path):
    with pytest.raises(ValueError, match=r"example 0 has label 5, but labels of 3 classes"):
        data.write_array_records(tmp_path / "x.array_record", [{"image": picture(0), "label": 5}], num_classes=3)
    with pytest.raises(
        ValueError, match=r"cannot write array records to 'x\.records': the name must end in \.array_record"
    ):
        data.write_array_records(tmp_path / "x.records", [])


def test_label_out_of_range_is_found_when_read():
    source = data.SOURCES["arrays"](images=IMAGES, labels=[0, 1, 2, 1])._replace(num_classes=2, arrays={})
    dataset = data.build(source)
    with pytest.raises(ValueError, match="example 2 of arrays has label 2, but labels of 2 classes"):
        dataset.batch(0, 4)


def test_files_that_are_no_array_records(tmp_path):
    (tmp_path / "x.array_record").write_bytes(b"something else" * 10_000)
    with pytest.raises(ValueError, match=r"x\.array_record is no complete array-record file"):
        data.load("array_records", path=tmp_path)
    data.write_array_records(tmp_path / "y.array_record", [{"image": picture(0)}])
    (tmp_path / "x.array_record").write_bytes((tmp_path / "y.array_record").read_bytes()[:70_000])
    with pytest.raises(ValueError, match=r"x\.array_record is no complete array-record file"):
        data.load("array_records", path=tmp_path / "x.array_record")


def test_foreign_array_records_and_unlike_shards(tmp_path):
    from array_record.python.array_record_module import ArrayRecordWriter

    for number, content in enumerate([b"{}", b"\x00\xff"]):
        writer = ArrayRecordWriter(str(tmp_path / f"{number}.array_record"), "group_size:1")
        writer.write(content)
        writer.close()
        with pytest.raises(ValueError, match=r"does not end in a jaxdiff|is no complete"):
            data.load("array_records", path=tmp_path / f"{number}.array_record")
    for name in "ab":
        data.write_array_records(
            tmp_path / f"{name}.array_record", [{"image": picture(0), "label": 0}], class_names=[name]
        )
    with pytest.raises(ValueError, match=r"a\.array_record, b\.array_record do not agree on their classes"):
        data.load("array_records", path=[tmp_path / "a.array_record", tmp_path / "b.array_record"])
