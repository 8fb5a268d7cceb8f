"""TensorFlow Datasets read without TensorFlow, and no foreign framework anywhere in the data code."""

import re
import subprocess
import sys

import numpy as np
import pytest
from image_makers import make_folder, random_image

from jaxdiff import data

# Preparing works without TensorFlow too when images are handed over as PIL images or tensors.
PREPARE = """
import sys
import numpy as np
import tensorflow_datasets as tfds
from PIL import Image
sys.path.insert(0, sys.argv[2])
from image_makers import random_image

class Shapes(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict({
            "image": tfds.features.Image(shape=(None, None, 3)),
            "raw": tfds.features.Tensor(shape=(4, 4, 1), dtype=np.uint8),
            "label": tfds.features.ClassLabel(names=["round", "square", "flat"]),
            "text": tfds.features.Text(),
            "number": tfds.features.Scalar(np.int64),
        }))

    def _split_generators(self, downloads):
        return {"train": self._generate_examples(10), "test": self._generate_examples(3)}

    def _generate_examples(self, count):
        for i in range(count):
            yield i, {"image": Image.fromarray(random_image(i)), "raw": random_image(i, 4, 4, 1), "label": i % 3, "text": f"shape {i % 2}", "number": i}

Shapes(data_dir=sys.argv[1], file_format="array_record").download_and_prepare()
assert not {"tensorflow", "torch"} & set(sys.modules)
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    place = tmp_path_factory.mktemp("tfds")
    here = re.sub(r"[^/]*$", "", __file__)
    subprocess.run([sys.executable, "-c", PREPARE, str(place), here], check=True, capture_output=True)
    return place


def numbers(batch: dict) -> list[int]:
    """Which random_image(i) each one is; TFDS shuffles while it prepares."""
    known = {(random_image(i) / np.float32(127.5) - 1).tobytes(): i for i in range(10)}
    return [known[image.tobytes()] for image in batch["image"]]


def test_images_labels_and_captions(prepared):
    dataset = data.load("tfds", dataset="shapes", data_dir=prepared, caption_key="text", shuffle=False)
    batch = dataset.take(0, 10)
    seen = numbers(batch)
    assert sorted(seen) == list(range(10))
    assert batch["label"].tolist() == [i % 3 for i in seen]
    assert [dataset.captions[i] for i in batch["caption_id"]] == [f"shape {i % 2}" for i in seen]
    assert (dataset.name, dataset.class_names) == ("tfds/shapes/1.0.0[train]", ("round", "square", "flat"))


def test_folder_slices_and_tensor_features(prepared):
    path = prepared / "shapes" / "1.0.0"
    half = data.load("tfds", dataset=path, split="train[:50%]", shuffle=False)
    whole = data.load("tfds", dataset=str(path), shuffle=False)
    assert (half.size, whole.size) == (5, 10)
    assert numbers(half.take(0, 5)) == numbers(whole.take(0, 10))[:5]
    assert half.fingerprint != whole.fingerprint
    raw = data.load("tfds", dataset=path, split="test", image_key="raw", label_key=None)
    assert (raw.shape, raw.num_classes, raw.batch(0, 2).keys()) == ((4, 4, 1), 0, {"image"})


def test_threads_read_the_same(prepared):
    dataset = data.load("tfds", dataset="shapes", data_dir=prepared, image_size=8, crop="global", flip=True)
    with data.prefetch(dataset, 0, 8, workers=4) as batches:
        for step in range(3):
            assert np.array_equal(next(batches)["image"], dataset.batch(step, 8)["image"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "validation"}, "'validation'.*shapes/1.0.0"),
        ({"image_key": "photo"}, "shapes/1.0.0.*'photo'.*image_key="),
        ({"caption_key": "words"}, "shapes/1.0.0.*'words'.*caption_key="),
        ({"label_key": "number"}, "'number'.*shapes/1.0.0.*ClassLabel"),
        ({"dataset": "shaeps"}, "'shaeps'"),
    ],
)
def test_wrong_names(prepared, options, message):
    with pytest.raises(ValueError, match=message):
        data.load("tfds", **{"dataset": "shapes", "data_dir": prepared, **options})


def test_a_missing_library_is_named(monkeypatch, prepared):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "jaxdiff\[tfds\]"'):
        data.load("tfds", dataset="shapes", data_dir=prepared)


def test_unprepared_sets_say_how_to_prepare_them(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        data.load("tfds", dataset="cifar10", data_dir=tmp_path)
    message = str(caught.value)
    assert f"TFDS dataset 'cifar10' is not prepared: nothing at {tmp_path}/cifar10" in message
    assert (
        f"tfds.builder('cifar10', file_format='array_record', data_dir='{tmp_path}').download_and_prepare()" in message
    )
    with pytest.raises(FileNotFoundError, match=r"/cifar10.*dataset_info\.json"):
        data.load("tfds", dataset=tmp_path / "cifar10")


def test_sets_that_only_tensorflow_reads(prepared, tmp_path):
    import json
    import shutil

    path = shutil.copytree(prepared / "shapes" / "1.0.0", tmp_path / "shapes" / "1.0.0")
    info = json.loads((path / "dataset_info.json").read_text())
    (path / "dataset_info.json").write_text(json.dumps({**info, "fileFormat": "tfrecord"}))
    with pytest.raises(
        ValueError,
        match=r"tfrecord.*file_format='array_record'",
    ):
        data.load("tfds", dataset=path)


def test_no_foreign_framework_is_imported_and_the_package_is_light(prepared, tmp_path):
    make_folder(tmp_path, ["a/0.png", "b/1.png"])
    data.write_array_records(tmp_path / "x.array_record", [{"image": random_image(0)}])
    code = f"""
import sys
from jaxdiff import data
heavy = {{"grain", "sklearn", "scipy", "PIL", "tensorflow_datasets", "array_record"}} & set(sys.modules)
sets = [data.load("digits"), data.load("folder", path={str(tmp_path)!r}), data.load("array_records", path={str(tmp_path)!r}),
        data.load("tfds", dataset="shapes", data_dir={str(prepared)!r}), data.load("mixture")]
for dataset in sets:
    with data.prefetch(dataset, 0, 4) as batches:
        next(batches)
print(sorted(heavy), sorted({{"tensorflow", "torch", "keras"}} & set(sys.modules)))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert ended.stdout == "[] []\n"


def test_pillow_is_the_only_decoder(prepared, monkeypatch):
    """TFDS would use OpenCV where it is installed, and pixels would depend on the machine."""
    from tensorflow_datasets.core.features import image_feature

    monkeypatch.setattr(image_feature.Image, "decode_example_np", lambda *_: pytest.fail("TFDS decoded the image"))
    assert data.load("tfds", dataset="shapes", data_dir=prepared).batch(0, 2)["image"].shape == (2, 12, 16, 3)
