"""What a run keeps of its data: a spec that is written and read back is the same, without the data."""

import dataclasses
import json

import numpy as np
import pytest
from image_makers import make_folder

from jaxdiff import autoencoders, data, models
from jaxdiff.conditions import Signal
from jaxdiff.data import DataSpec, spec
from jaxdiff.data.captions import HashedText, StoredText
from jaxdiff.data.shapes import CAPTIONS


def stored_text(folder, rows, dtype=np.float16):
    """Embeddings of text, one row more than there are captions."""
    rng = np.random.default_rng(0)
    np.save(folder / "text.npy", rng.normal(size=(rows + 1, 3, 4)).astype(dtype))
    np.save(folder / "text_mask.npy", np.arange(3) < rng.integers(1, 4, (rows + 1, 1)))
    np.save(folder / "pooled.npy", rng.normal(size=(rows + 1, 5)).astype(np.float32))
    return str(folder)


def latents(folder):
    model = models.AutoencoderKL(**models.vae.SIZES["sd3"])
    autoencoders.write(folder / "z.npz", np.zeros((3, 4, 4, 16)), model, labels=[0, 1, 1], class_names=["a", "b"])
    return data.load("latents", path=folder / "z.npz")


def captioned_folder(folder):
    make_folder(folder, [f"{i}.png" for i in range(4)])
    (folder / "captions.json").write_text(json.dumps({f"{i}.png": f"image {i % 2}" for i in range(4)}))
    return data.load("folder", path=folder, caption_text=stored_text(folder, 2), image_size=8, control=("crop", "flip"))


DATA = {
    "digits": lambda folder: data.load("digits", seed=3),
    "points": lambda folder: data.load("mixture", preset="ring", count=9),
    "unlabelled": lambda folder: data.load("arrays", images=np.zeros((2, 4, 4, 1), np.uint8)),
    "hashed": lambda folder: data.load("shapes", count=9, size=8, caption_text=(12, 16), pooling="mean"),
    "stored": lambda folder: data.load("shapes", count=9, size=8, caption_text=stored_text(folder, len(CAPTIONS))),
    "folder": captioned_folder,
    "prompts": lambda folder: data.load("prompts", path=stored_text(folder, 6), shape=(8, 8, 4)),
    "latents": latents,
}


def written(workdir, dataset):
    spec.write(workdir, dataset)
    return spec.read(workdir)


@pytest.fixture(params=sorted(DATA))
def pair(request, tmp_path):
    """A dataset, and its spec from a workdir while the folder of the data is empty."""
    source, workdir = tmp_path / "data", tmp_path / "run"
    source.mkdir()
    workdir.mkdir()
    dataset = DATA[request.param](source)
    spec.write(workdir, dataset)
    for path in sorted(source.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    return dataset, spec.read(workdir)


def test_a_spec_is_the_same_after_it_was_written(pair):
    dataset, found = pair
    assert type(found) is DataSpec
    for field in ("name", "shape", "size", "fingerprint", "class_names", "latent", "num_classes", "example_captions"):
        assert getattr(found, field) == getattr(dataset, field), field
        assert type(getattr(found, field)) is type(getattr(dataset, field)), field


def test_signals_are_the_same_after_they_were_written(pair):
    dataset, found = pair
    assert set(found.signals) == set(dataset.signals)
    for name, signal in dataset.signals.items():
        again = found.signals[name]
        assert (again.shape, again.dtype, again.group) == (signal.shape, signal.dtype, signal.group), name
        assert type(again.null) is type(signal.null), name
        np.testing.assert_array_equal(again.null, signal.null)
    for name in dataset.example_text:
        np.testing.assert_array_equal(found.signals[name].null, dataset.signals[name].null)


def test_the_text_of_the_first_examples_is_kept(pair):
    dataset, found = pair
    assert set(found.example_text) == set(dataset.example_text)
    for name, rows in dataset.example_text.items():
        np.testing.assert_array_equal(found.example_text[name], rows)
        assert found.example_text[name].dtype == rows.dtype


def test_prompts_are_embedded_as_before(pair):
    dataset, found = pair
    if dataset.text is None:
        assert found.text is None
        return
    prompts = [dataset.example_captions[1], "", dataset.example_captions[0]]
    wanted, rows = dataset.text(prompts), found.text(prompts)
    assert set(rows) == set(wanted)
    for name in wanted:
        np.testing.assert_allclose(rows[name], wanted[name], rtol=1e-6)


def test_a_dataset_is_a_spec_and_examples_are_those_it_begins_with():
    dataset = data.load("shapes", count=9, size=8, caption_text=(12, 16))
    assert isinstance(dataset, DataSpec)
    batch = dataset.take(0, 5)
    assert [dataset.captions[i] for i in batch["caption_id"]] == list(dataset.example_captions[:5])
    np.testing.assert_array_equal(dataset.example_text["text"][:5], batch["text"])
    assert data.load("digits").example_captions == () and data.load("digits").example_text == {}


# ------------------------------------------------------------------------------------------ encoders


def test_hashed_words_are_rebuilt_and_embed_any_prompt(tmp_path):
    found = written(tmp_path, data.load("shapes", count=9, size=8, caption_text=(12, 16), pooling="mean"))
    assert found.text == HashedText(12, 16, "mean")
    rows = found.text(["something never seen"])
    np.testing.assert_array_equal(rows["text"], data.hashed_text(["something never seen"], 12, 16)["text"])
    record = json.loads((tmp_path / "data.json").read_text())
    assert record["text"] == {"length": 12, "width": 16, "pooling": "mean"}
    with np.load(tmp_path / "data.npz") as arrays:
        assert not [name for name in arrays.files if name.startswith("example/")]  # embedded again when read


def test_stored_embeddings_refuse_unknown_prompts_by_name(tmp_path):
    source, workdir = tmp_path / "data", tmp_path / "run"
    source.mkdir()
    workdir.mkdir()
    found = written(workdir, DATA["stored"](source))
    assert isinstance(found.text, StoredText)
    known = found.example_captions[0]
    with pytest.raises(ValueError, match=rf"data.json.*'{known[:-1]}'.*did you mean '{known}'"):
        found.text([known, known[:-1]])
    with pytest.raises(ValueError, match=r"'a dog'"):
        found.text(["a dog"])


# ------------------------------------------------------------------------------------------ files


def test_stored_embeddings_are_bounded(tmp_path, monkeypatch):
    source, workdir = tmp_path / "data", tmp_path / "run"
    source.mkdir()
    workdir.mkdir()
    dataset = DATA["stored"](source)
    each = sum(rows[:1].nbytes for rows in dataset.example_text.values())
    monkeypatch.setattr(spec, "ROOM", 3 * each + 1)
    found = written(workdir, dataset)
    assert len(found.example_captions) == 3 and found.example_captions == dataset.example_captions[:3]
    assert {name: len(rows) for name, rows in found.example_text.items()} == dict.fromkeys(dataset.example_text, 3)
    monkeypatch.setattr(spec, "ROOM", 0)
    assert len(written(workdir, dataset).example_captions) == 1  # enough to sample


def test_files_are_whole_or_not_there(tmp_path):
    assert spec.read(tmp_path) is None
    spec.write(tmp_path, data.load("digits"))
    assert [path.name for path in tmp_path.iterdir()] == ["data.json"]  # no arrays, and nothing partial
    spec.write(tmp_path, data.load("shapes", count=9, size=8, caption_text=(12, 16)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.json", "data.npz"]
    assert spec.read(tmp_path).name == "shapes"


def test_arrays_of_another_run_are_not_read(tmp_path):
    """data.npz left over from data with text does not reach a spec without."""
    spec.write(tmp_path, data.load("shapes", count=9, size=8, caption_text=(12, 16)))
    spec.write(tmp_path, data.load("digits"))
    assert spec.read(tmp_path).example_text == {} and spec.read(tmp_path).signals["label"].null == 10


def test_signals_of_ones_own_are_kept(tmp_path):
    own = {"depth": Signal((4,), "float32", 0.5, "geometry"), "mask": Signal((2, 2), "float32", np.ones((2, 2)))}
    dataset = data.load("digits")
    dataset = dataclasses.replace(dataset, signals={**dataset.signals, **own})
    found = written(tmp_path, dataset).signals
    assert (found["depth"].null, found["depth"].group, found["label"].null) == (0.5, "geometry", 10)
    np.testing.assert_array_equal(found["mask"].null, np.ones((2, 2)))
