"""Messages: what was given, what is allowed, what to change, before anything is computed."""

import re

import numpy as np
import pytest
from image_makers import make_folder, random_image

from jaxdiff import data

IMAGES = np.zeros((4, 6, 8, 3), np.uint8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"source": "digts"},
            r"'digts'.*did you mean 'digits'.*digits, arrays, folder",
        ),
        (
            {"flop": True},
            r"'flop'.*'digits'.*did you mean 'flip'.*split.*seed",
        ),
        ({"source": "folder"}, r"'folder'.*'path'"),
        ({"split": "valid"}, r"'valid'.*all, train, test"),
        ({"seed": -1}, r"seed.*got -1"),
        ({"crop": "center"}, r"crop='center'.*image_size"),
        ({"crop": "centre", "image_size": 8}, r"'centre'.*did you mean 'center'"),
        ({"image_size": 0}, r"image_size.*got 0"),
        ({"local_share": 1.5, "crop": "mixed", "image_size": 8}, r"local_share.*got 1.5"),
        ({"channels": 2}, r"channels.*got 2"),
        ({"resample": "cubic"}, r"'cubic'.*did you mean 'bicubic'"),
        ({"control": ("crop", "flipped")}, r"'flipped'.*did you mean 'flip'"),
        ({"on_corrupt": "ignore"}, r"on_corrupt.*'ignore'.*skip, stop"),
        (
            {"crop": "local", "image_size": 9},
            r"example 0 of digits.*8 x 8.*local crop of 9",
        ),
        ({"source": "mixture", "flip": True}, r"'mixture/grid'.*\(2,\)"),
        ({"source": "mixture", "preset": "rings"}, r"'rings'.*did you mean 'ring'"),
        ({"source": "mixture", "dim": 9}, r"'grid'.*1 to 5.*dim=9"),
        (
            {"source": "mixture", "std": [1, 2, 3], "means": [[0, 0]]},
            r"mixture of 1.*weights and stds",
        ),
        ({"source": "mixture", "means": [0, 1]}, r"means.*\[k d\]"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        data.load(options.pop("source", "digits"), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"images": IMAGES[:0]}, r"'arrays'.*no examples"),
        ({"images": IMAGES, "labels": [0, 1, 2]}, r"4 integer labels, got shape \(3,\)"),
        ({"images": IMAGES, "labels": [0.0] * 4}, r"4 integer labels, got shape \(4,\) of float64"),
        (
            {"images": IMAGES, "labels": [0, 3, -1, 2], "num_classes": 3},
            r"example 1 of arrays \(and 1 more\).*label 3.*3 classes.*num_classes",
        ),
        ({"images": IMAGES, "labels": [0, 1, 2, 3], "class_names": ["a", "b"]}, r"2 classes"),
        (
            {"images": IMAGES, "caption_ids": [0, 1, 2, 0], "captions": ["a", "b"]},
            r"caption id 2.*2 captions",
        ),
        ({"images": IMAGES[0, 0]}, r"\[n h w c\].*got \(8, 3\)"),
        ({"images": IMAGES.astype(np.int64)}, r"uint8.*got int64"),
        (
            {"images": np.full((1, 2, 2, 1), 255.0)},
            r"\[-1, 1\].*255 to 255|\[-1, 1\].*0 to 255",
        ),
        ({"images": np.full((1, 2, 2, 1), np.nan)}, r"\[-1, 1\].*nan"),
        ({"images": "x.npz", "labels": [0]}, r"\.npz"),
    ],
)
def test_wrong_arrays(options, message):
    with pytest.raises(ValueError, match=message):
        data.load("arrays", **options)


@pytest.mark.parametrize(("source", "option"), [("folder", "path"), ("arrays", "images"), ("array_records", "path")])
def test_missing_files_name_the_path_tried(tmp_path, monkeypatch, source, option):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "no" / "such"))):
        data.load(source, **{option: "no/such"})


def test_empty_places(tmp_path):
    (tmp_path / "x.txt").write_text("")
    with pytest.raises(ValueError, match=re.escape(str(tmp_path)) + r".*\.png \.jpg"):
        data.load("folder", path=tmp_path)
    with pytest.raises(FileNotFoundError, match=r"\*\.array_record.*" + re.escape(str(tmp_path))):
        data.load("array_records", path=tmp_path)
    data.write_array_records(tmp_path / "x.array_record", [])
    with pytest.raises(ValueError, match=r"'array_records/x.array_record'.*no examples"):
        data.load("array_records", path=tmp_path)


def test_npz_without_images(tmp_path):
    np.savez(tmp_path / "x.npz", photos=IMAGES)
    with pytest.raises(ValueError, match=r"photos.*'images'"):
        data.load("arrays", images=str(tmp_path / "x.npz"))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ((0, 10, 0, 4), r"10.*4 processes.*8"),
        ((0, 3, 0, 8), r"3.*8 processes.*8"),
        ((0, 8, 2, 2), r"process_index.*got 2 of 2"),
        ((-1, 8), r"got step -1"),
        ((0, 0), r"got step 0 and batch_size 0"),
    ],
)
def test_wrong_batches(call, message):
    with pytest.raises(ValueError, match=message):
        data.load("digits").batch(*call)


def test_wrong_positions():
    with pytest.raises(ValueError, match=r"got 3 \.\. 3"):
        data.load("digits").take(3, 3)


# ---------------------------------------------------------------------------------------------- folders and records


def test_images_of_different_sizes(tmp_path):
    make_folder(tmp_path, ["0.png"])
    make_folder(tmp_path, ["1.png"], height=9)
    with pytest.raises(ValueError, match=r"1\.png.*\(9, 16, 3\).*\(12, 16, 3\).*image_size="):
        data.load("folder", path=tmp_path).batch(0, 2)


def test_image_too_small_for_a_window_is_named(tmp_path):
    make_folder(tmp_path, ["0.png"])
    make_folder(tmp_path, ["1.png"], height=9)
    dataset = data.load("folder", path=tmp_path, image_size=10, crop="local")
    with pytest.raises(ValueError, match=r"1\.png.*9 x 16.*10.*crop='global'"):
        dataset.batch(0, 2)


def test_images_beside_class_folders(tmp_path):
    make_folder(tmp_path, ["a/0.png", "b/0.png", "stray.png"])
    with pytest.raises(ValueError, match=r"'stray\.png' and 0 more"):
        data.load("folder", path=tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("captions.json", '{"0.png": "x"}', r"2 of 3.*1.png, 2.png"),
        ("captions.json", '["x"]', r"captions.json.*one object"),
        ("captions.csv", "0.png,a dog, running\n", r"row 1 of.*captions.csv"),
        ("captions.csv", "0.png,a dog, running\n", r"3 fields"),
    ],
)
def test_wrong_captions(tmp_path, name, content, message):
    make_folder(tmp_path, ["0.png", "1.png", "2.png"])
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        data.load("folder", path=tmp_path)


def test_captions_of_the_wrong_kind_or_place(tmp_path):
    make_folder(tmp_path, ["0.png"])
    with pytest.raises(FileNotFoundError, match=r"gone\.json.*tried"):
        data.load("folder", path=tmp_path, captions=tmp_path / "gone.json")
    with pytest.raises(ValueError, match=r"\.json, \.csv or \.tsv.*'0\.png'"):
        data.load("folder", path=tmp_path, captions=tmp_path / "0.png")


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([{"image": random_image(0), "label": 1}], r"example 0.*num_classes= or class_names="),
        (
            [{"image": random_image(0)}, {"image": random_image(0), "label": 1}],
            r"example 1.*\['image', 'label'\]",
        ),
        ([{"photo": random_image(0)}], r"example 0.*\['photo'\]"),
        (
            [{"image": random_image(0)[0]}],
            r"example 0.*\(16, 3\) and uint8",
        ),
        ([{"image": random_image(0).astype(np.float64)}], r"float64.*uint8 or float32"),
    ],
)
def test_wrong_records_are_not_written(tmp_path, examples, message):
    with pytest.raises(ValueError, match=message):
        data.write_array_records(tmp_path / "x.array_record", examples)
    assert not list(tmp_path.iterdir())


def test_wrong_labels_and_names_of_records(tmp_path):
    with pytest.raises(ValueError, match=r"example 0.*label 5.*3 classes"):
        data.write_array_records(tmp_path / "x.array_record", [{"image": random_image(0), "label": 5}], num_classes=3)
    with pytest.raises(ValueError, match=r"'x\.records'.*\.array_record"):
        data.write_array_records(tmp_path / "x.records", [])


def test_label_out_of_range_is_found_when_read():
    source = data.SOURCES["arrays"](images=IMAGES, labels=[0, 1, 2, 1])._replace(num_classes=2, arrays={})
    dataset = data.build(source)
    with pytest.raises(ValueError, match=r"example 2 of arrays.*label 2.*2 classes"):
        dataset.batch(0, 4)


def test_files_that_are_no_array_records(tmp_path):
    (tmp_path / "x.array_record").write_bytes(b"something else" * 10_000)
    with pytest.raises(ValueError, match=r"x\.array_record"):
        data.load("array_records", path=tmp_path)
    data.write_array_records(tmp_path / "y.array_record", [{"image": random_image(0)}])
    (tmp_path / "x.array_record").write_bytes((tmp_path / "y.array_record").read_bytes()[:70_000])
    with pytest.raises(ValueError, match=r"x\.array_record"):
        data.load("array_records", path=tmp_path / "x.array_record")


def test_foreign_array_records_and_unlike_shards(tmp_path):
    from array_record.python.array_record_module import ArrayRecordWriter

    for number, content in enumerate([b"{}", b"\x00\xff"]):
        writer = ArrayRecordWriter(str(tmp_path / f"{number}.array_record"), "group_size:1")
        writer.write(content)
        writer.close()
        with pytest.raises(ValueError, match=rf"{number}\.array_record"):
            data.load("array_records", path=tmp_path / f"{number}.array_record")
    for name in "ab":
        data.write_array_records(
            tmp_path / f"{name}.array_record", [{"image": random_image(0), "label": 0}], class_names=[name]
        )
    with pytest.raises(ValueError, match=r"a\.array_record, b\.array_record.*classes"):
        data.load("array_records", path=[tmp_path / "a.array_record", tmp_path / "b.array_record"])
