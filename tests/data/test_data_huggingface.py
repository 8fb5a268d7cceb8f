"""Hugging Face datasets from their files: Parquet and Arrow, labels with names, captions, splits, damage."""

import io
import json

import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import ipc, parquet

from jaxdiff import data
from jaxdiff.data.huggingface import huggingface

ROWS = 6
LABEL = {"info": {"features": {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}}}


def png(value):
    stream = io.BytesIO()
    Image.new("RGB", (4, 4), (value, 0, 0)).save(stream, "PNG")
    return stream.getvalue()


def table(count=ROWS, names=True):
    columns = {
        "image": [{"bytes": png(i), "path": f"{i}.png"} for i in range(count)],
        "label": [i % 2 for i in range(count)],
        "text": [f"number {i // 2}" for i in range(count)],
    }
    made = pyarrow.table(columns)
    return made.replace_schema_metadata({b"huggingface": json.dumps(LABEL).encode()}) if names else made


def write_stream(made, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    with pyarrow.OSFile(str(path), "wb") as file, ipc.new_stream(file, made.schema) as writer:
        writer.write_table(made)


@pytest.fixture
def folder(tmp_path):
    made = table()
    (tmp_path / "data").mkdir()
    parquet.write_table(made.slice(0, 4), tmp_path / "data" / "train-00000-of-00002.parquet")
    parquet.write_table(made.slice(4), tmp_path / "data" / "train-00001-of-00002.parquet")
    parquet.write_table(made.slice(0, 1), tmp_path / "data" / "test-00000-of-00001.parquet")
    return tmp_path


def check(dataset, **options):
    batch = dataset.take(0, ROWS)
    np.testing.assert_array_equal(np.round(batch["image"][:, 0, 0, 0] * 127.5 + 127.5), np.arange(ROWS))
    np.testing.assert_array_equal(batch["label"], np.arange(ROWS) % 2)
    assert dataset.num_classes == 2


def test_parquet_files_of_a_split(folder):
    dataset = data.load("huggingface", path=folder, shuffle=False)
    check(dataset)
    assert (dataset.size, dataset.class_names, dataset.shape) == (ROWS, ("cat", "dog"), (4, 4, 3))
    assert data.load("huggingface", path=folder, split="test").size == 1
    other = data.load("huggingface", path=folder, split="test")
    assert other.fingerprint != dataset.fingerprint


def test_captions_are_a_column(folder):
    source = huggingface(folder, caption="text")
    assert source.captions == ("number 0", "number 1", "number 2")
    assert [source.read(i)["caption_id"] for i in range(ROWS)] == [0, 0, 1, 1, 2, 2]


def test_a_saved_dataset_is_mapped(tmp_path):
    write_stream(table(names=False), tmp_path / "train" / "data-00000-of-00001.arrow")
    with ipc.new_file(str(tmp_path / "other.arrow"), table().schema) as writer:
        writer.write_table(table())
    check(data.load("huggingface", path=tmp_path, shuffle=False))
    check(data.load("huggingface", path=tmp_path / "other.arrow", shuffle=False))


def test_columns_have_any_name_and_labels_may_be_absent(tmp_path):
    made = table().rename_columns(["img", "fine", "text"])
    parquet.write_table(made, tmp_path / "train.parquet")
    check(data.load("huggingface", path=tmp_path, image="img", label="fine", shuffle=False))
    assert data.load("huggingface", path=tmp_path, image="img").num_classes == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "trian"}, "did you mean 'train'"),
        ({"image": "imag"}, "did you mean 'image'"),
        ({"label": "text"}, "class numbers"),
        ({"label": "none"}, "'none'"),
        ({"caption": "label"}, "one text per row"),
    ],
)
def test_what_is_not_there_is_named(folder, options, message):
    with pytest.raises(ValueError, match=message):
        data.load("huggingface", path=folder, **options)


def test_damaged_files_and_rows_without_an_image(tmp_path):
    with pytest.raises(FileNotFoundError, match="no dataset at"):
        data.load("huggingface", path=tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=r"\.parquet or \.arrow"):
        data.load("huggingface", path=tmp_path)
    (tmp_path / "train.parquet").write_bytes(b"PAR1 and nothing")
    with pytest.raises(ValueError, match=r"train\.parquet is no \.parquet file"):
        data.load("huggingface", path=tmp_path)
    (tmp_path / "train.parquet").unlink()
    (tmp_path / "train.arrow").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"train\.arrow is no \.arrow file"):
        data.load("huggingface", path=tmp_path)
    (tmp_path / "train.arrow").unlink()
    rows = table().set_column(0, "image", [[{"bytes": png(1), "path": ""}, *[{"bytes": None, "path": "a.png"}] * 5]])
    parquet.write_table(rows, tmp_path / "train.parquet")
    with pytest.raises(data.CorruptImage, match="no encoded image"):
        data.load("huggingface", path=tmp_path, shuffle=False, on_corrupt="stop").take(0, 2)
