"""What each source gives: pixels, labels, captions, fingerprints."""

import json

import numpy as np
import pytest
from image_makers import encoded, joined, make_folder, random_image

from jaxdiff import data
from jaxdiff.data.examples import to_float


def one_epoch(dataset: data.Dataset) -> dict:
    return dataset.take(0, dataset.size)


# ---------------------------------------------------------------------------------------------- digits


def test_digits_are_scikit_learns():
    from sklearn.datasets import load_digits

    real = load_digits()
    dataset = data.load("digits", shuffle=False)
    batch = one_epoch(dataset)
    assert np.array_equal(batch["image"][..., 0], real.images.astype(np.float32) / 8 - 1)
    assert np.array_equal(batch["label"], real.target)
    assert (dataset.size, dataset.shape, dataset.num_classes, dataset.class_names[3]) == (
        1797,
        (8, 8, 1),
        10,
        "3",
    )


def test_digit_splits_are_disjoint_and_complete():
    parts = {split: data.load("digits", split=split, shuffle=False) for split in ("train", "test")}
    assert {split: part.size for split, part in parts.items()} == {"train": 1500, "test": 297}
    rows = [row.tobytes() for part in parts.values() for row in one_epoch(part)["image"]]
    assert sorted(rows) == sorted(row.tobytes() for row in one_epoch(data.load("digits"))["image"])
    assert np.bincount(one_epoch(parts["test"])["label"]).min() > 15
    assert len({part.fingerprint for part in parts.values()}) == 2


# ---------------------------------------------------------------------------------------------- arrays


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
def test_arrays_in_any_form(dtype):
    bytes_ = np.stack([random_image(i, 3, 5, 1) for i in range(4)])
    images = bytes_ if dtype == np.uint8 else (bytes_ / 127.5 - 1).astype(dtype)
    dataset = data.load("arrays", images=images[..., 0], shuffle=False)
    assert np.abs(one_epoch(dataset)["image"] - (bytes_ / 127.5 - 1)).max() < 1e-6
    assert (dataset.shape, dataset.num_classes, one_epoch(dataset).keys()) == ((3, 5, 1), 0, {"image"})


def test_byte_ends_are_exact():
    assert to_float(np.array([0, 255], np.uint8)).tolist() == [-1, 1]


def test_npz_file(tmp_path):
    images, labels = np.stack([random_image(i, 3, 5) for i in range(4)]), np.array([0, 2, 1, 0])
    np.savez(
        tmp_path / "x.npz",
        images=images,
        labels=labels,
        class_names=["a", "b", "c"],
        caption_ids=[1, 0, 0, 1],
        captions=["one", "two"],
        more=1,
    )
    dataset = data.load("arrays", images=tmp_path / "x.npz", shuffle=False)
    batch = one_epoch(dataset)
    assert np.array_equal(batch["image"], images / np.float32(127.5) - 1)
    assert batch["label"].tolist() == labels.tolist()
    assert [dataset.captions[i] for i in batch["caption_id"]] == ["two", "one", "one", "two"]
    assert dataset.class_names == ("a", "b", "c")


def test_fingerprint_follows_content():
    images = np.stack([random_image(i, 3, 5) for i in range(4)])
    marks = [data.load("arrays", images=images, labels=[0, 1, 0, 1], seed=s).fingerprint for s in (0, 1)]
    marks += [
        data.load("arrays", images=images).fingerprint,
        data.load("arrays", images=images[::-1], labels=[0, 1, 0, 1]).fingerprint,
    ]
    assert marks[0] == marks[1]
    assert len(set(marks)) == 3
    assert len(marks[0]) == 64


# ---------------------------------------------------------------------------------------------- folders


def test_sub_folders_are_classes(tmp_path):
    make_folder(tmp_path, ["cat/1.png", "ape/x/2.PNG", "ape/1.png", "cat/.hidden.png"])
    (tmp_path / "ape" / "notes.txt").write_text("no image")
    dataset = data.load("folder", path=tmp_path, shuffle=False)
    assert (dataset.class_names, dataset.num_classes, dataset.size, dataset.captions) == (("ape", "cat"), 2, 3, ())
    batch = one_epoch(dataset)
    assert batch["label"].tolist() == [0, 0, 1]
    assert np.array_equal(
        batch["image"], np.stack([random_image(2), random_image(1), random_image(0)]) / np.float32(127.5) - 1
    )


@pytest.mark.parametrize("kind", ["json", "csv", "tsv", "elsewhere"])
def test_captions(tmp_path, kind):
    root = make_folder(tmp_path / "images", ["a.png", "b.png", "c.png"])
    table = {"b.png": "a dog, running", "a.png": "a cat", "c.png": "a cat", "gone.png": "not there"}
    if kind == "csv":
        (root / "captions.csv").write_text('file,caption\nb.png,"a dog, running"\na.png,a cat\nc.png,a cat\n')
    elif kind == "tsv":
        (root / "captions.tsv").write_text("".join(f"{file}\t{text}\n" for file, text in table.items()))
    else:
        ((tmp_path / "x.json") if kind == "elsewhere" else root / "captions.json").write_text(json.dumps(table))
    options = {"captions": tmp_path / "x.json"} if kind == "elsewhere" else {}
    dataset = data.load("folder", path=root, shuffle=False, **options)
    assert dataset.captions == ("a cat", "a dog, running")
    batch = one_epoch(dataset)
    assert batch["caption_id"].tolist() == [0, 1, 0]
    assert batch["caption_id"].dtype == np.int32
    assert "label" not in batch


def test_grey_and_colour_files_mix(tmp_path):
    make_folder(tmp_path, ["a.png"])
    (tmp_path / "b.png").write_bytes(encoded(random_image(1, channels=1)))
    assert data.load("folder", path=tmp_path).batch(0, 2)["image"].shape == (2, 12, 16, 3)
    assert data.load("folder", path=tmp_path, channels=1).batch(0, 2)["image"].shape == (2, 12, 16, 1)


def test_folder_fingerprint_follows_names_sizes_and_captions(tmp_path):
    one, other = make_folder(tmp_path / "one", ["a.png", "b.png"]), make_folder(tmp_path / "two", ["a.png", "b.png"])
    first = data.load("folder", path=one).fingerprint
    assert data.load("folder", path=other).fingerprint == first
    (other / "captions.json").write_text('{"a.png": "x", "b.png": "y"}')
    second = data.load("folder", path=other).fingerprint
    (one / "b.png").rename(one / "c.png")
    assert len({first, second, data.load("folder", path=one).fingerprint}) == 3


# ---------------------------------------------------------------------------------------------- array records


def test_array_records_round_trip(tmp_path):
    images = [random_image(i, 6, 4) for i in range(7)]
    examples = [{"image": p, "label": i % 3, "caption": f"number {i % 2}"} for i, p in enumerate(images)]
    assert data.write_array_records(tmp_path / "x.array_record", iter(examples), class_names=["a", "b", "c"]) == 7
    dataset = data.load("array_records", path=tmp_path / "x.array_record", shuffle=False)
    batch = one_epoch(dataset)
    assert np.array_equal(batch["image"], np.stack(images) / np.float32(127.5) - 1)
    assert batch["label"].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert [dataset.captions[i] for i in batch["caption_id"]] == [example["caption"] for example in examples]
    assert (dataset.class_names, dataset.num_classes) == (("a", "b", "c"), 3)
    assert [path.name for path in tmp_path.iterdir()] == ["x.array_record"]


def test_array_records_hold_floats_and_image_files(tmp_path):
    floats = (random_image(0, 5, 5) / 127.5 - 1).astype(np.float32)
    data.write_array_records(tmp_path / "f.array_record", [{"image": floats}])
    assert np.array_equal(data.load("array_records", path=tmp_path / "f.array_record").batch(0, 1)["image"][0], floats)
    data.write_array_records(tmp_path / "p.array_record", [{"image": encoded(random_image(0))}])
    batch = data.load("array_records", path=tmp_path / "p.array_record").batch(0, 1)
    assert np.array_equal(batch["image"][0], random_image(0) / np.float32(127.5) - 1)


def test_shards_are_one_dataset(tmp_path):
    for shard in range(3):
        rows = [{"image": random_image(10 * shard + i, 4, 4), "caption": f"{shard} {i}"} for i in range(shard + 1)]
        data.write_array_records(tmp_path / f"{shard}.array_record", rows)
    dataset = data.load("array_records", path=tmp_path, shuffle=False)
    batch = one_epoch(dataset)
    seeds = [0, 10, 11, 20, 21, 22]
    assert np.array_equal(batch["image"], np.stack([random_image(s, 4, 4) for s in seeds]) / np.float32(127.5) - 1)
    assert [dataset.captions[i] for i in batch["caption_id"]] == ["0 0", "1 0", "1 1", "2 0", "2 1", "2 2"]
    parts = [dataset.batch(0, 6, p, 3) for p in range(3)]
    assert np.array_equal(joined(parts)["image"], batch["image"])


def test_a_damaged_record_is_a_corrupt_image(tmp_path):
    path = tmp_path / "x.array_record"
    data.write_array_records(path, [{"image": random_image(i, 20, 20)} for i in range(4)])
    content = bytearray(path.read_bytes())
    content[content.index(random_image(1, 20, 20).tobytes()[:40])] ^= 0xFF  # random pixels are stored as they are
    path.write_bytes(content)
    messages = []
    dataset = data.load("array_records", path=path, shuffle=False, log=messages.append)
    batch = one_epoch(dataset)
    assert np.array_equal(
        batch["image"], np.stack([random_image(i, 20, 20) for i in (0, 2, 2, 3)]) / np.float32(127.5) - 1
    )
    assert list(dataset.corrupt) == [f"record 1 of {path}"]
    assert len(messages) == 1


def test_failed_writing_leaves_no_file(tmp_path):
    def examples():
        yield {"image": random_image(0)}
        raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        data.write_array_records(tmp_path / "x.array_record", examples())
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------------------- mixtures


@pytest.mark.parametrize(("preset", "modes"), [("grid", 25), ("ring", 8), ("pair", 2)])
def test_mixture_presets(preset, modes):
    dataset = data.load("mixture", preset=preset, std=0.01, count=4000)
    batch = one_epoch(dataset)
    means = data.mixture_means(preset)
    assert (dataset.num_classes, means.shape, batch["image"].shape) == (modes, (modes, 2), (4000, 2))
    assert np.abs(batch["image"] - means[batch["label"]]).max() < 0.01 * 5
    counts = np.bincount(batch["label"], minlength=modes)
    assert np.abs(counts - 4000 / modes).max() < 5 * np.sqrt(4000 / modes)


def test_mixture_of_ones_own():
    dataset = data.load("mixture", means=[[0, 0, 5], [0, 3, 0]], std=[0.1, 1], weights=[3, 1], count=8000)
    batch = one_epoch(dataset)
    points, labels = batch["image"], batch["label"]
    assert dataset.shape == (3,)
    assert abs((labels == 0).mean() - 0.75) < 0.03
    assert np.abs(points[labels == 0].mean(0) - [0, 0, 5]).max() < 0.01
    assert np.abs(points[labels == 1].std(0) - 1).max() < 0.06


def test_mixture_in_more_dimensions():
    assert data.mixture_means("grid", 3).shape == (125, 3)
    assert np.allclose(np.linalg.norm(data.mixture_means("ring", 7), axis=1), 1)
    assert data.load("mixture", preset="ring", dim=7, count=10).batch(0, 4)["image"].shape == (4, 7)


def test_options_of_sources_and_of_build_do_not_collide():
    import inspect

    common = set(inspect.signature(data.build).parameters)
    for constructor in data.SOURCES.values():
        assert not common & set(inspect.signature(constructor).parameters)


def test_blank_has_the_shape_and_the_classes_and_nothing_else():
    dataset = data.load("blank", shape=(8, 8, 3), num_classes=4)
    batch = dataset.batch(0, 6)
    assert batch["image"].shape == (6, 8, 8, 3) and dataset.num_classes == 4
    assert set(batch["label"]) <= set(range(4)) and len(np.unique(batch["image"])) == 1
    assert set(data.load("blank", shape=(2,)).batch(0, 3)) == {"image"}
    with pytest.raises(ValueError, match=r"blank.*shape.*got \(\)"):
        data.load("blank", shape=())
