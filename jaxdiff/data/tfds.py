"""Datasets prepared by TensorFlow Datasets, read without TensorFlow."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxdiff.data.examples import Example, Source
from jaxdiff.data.transforms import MAX_PIXELS, CorruptImage, decode
from jaxdiff.errors import optional_import


def tfds(
    dataset: str | os.PathLike,
    split: str = "train",
    *,
    data_dir: str | os.PathLike | None = None,
    image_key: str = "image",
    label_key: str | None = "label",
    caption_key: str | None = None,
    max_pixels: int = MAX_PIXELS,
) -> Source:
    """A split ("train", "train[:90%]") of an image dataset in array-record files.

    `dataset` is a name such as "cifar10", looked up in `data_dir`, or the folder that holds its dataset_info.json.
    `caption_key` names a text feature; its column is read once at the start. Labels are left out when absent.
    Encoded images of more than `max_pixels` are not decoded.
    """
    builder = _builder(dataset, data_dir)
    features = builder.info.features
    if image_key not in features:
        raise ValueError(
            f"{builder.info.full_name} has no feature {image_key!r}; set image_key= to one of {', '.join(features)}"
        )
    if caption_key is not None and caption_key not in features:
        raise ValueError(
            f"{builder.info.full_name} has no feature {caption_key!r}; set caption_key= to one of {', '.join(features)}"
        )
    classes = features[label_key] if label_key is not None and label_key in features else None
    if classes is not None and not hasattr(classes, "num_classes"):
        raise ValueError(
            f"feature {label_key!r} of {builder.info.full_name} is not a ClassLabel; set label_key= to one, or to None"
        )
    records = _records(builder, split, image_key)
    name = f"{builder.info.full_name}[{split}]"
    captions, caption_ids = _captions(records, caption_key)

    def describe(index: int) -> str:
        return f"example {index} of {name}"

    def read(index: int) -> Example:
        try:
            record = records[index]
        except RuntimeError as error:  # checksum mismatch
            raise CorruptImage(f"cannot read {describe(index)}: {error}") from error
        example: Example = {"image": _pixels(record[image_key], describe(index), max_pixels)}
        if classes is not None and label_key is not None:
            example["label"] = int(record[label_key])
        if captions:
            example["caption_id"] = caption_ids[index]
        return example

    return Source(
        name=f"tfds/{name}",
        size=len(records),
        read=read,
        describe=describe,
        fingerprint=_fingerprint(builder, split, len(records)),
        num_classes=classes.num_classes if classes is not None else 0,
        class_names=tuple(classes.names) if classes is not None else (),
        captions=captions,
    )


def _builder(dataset: str | os.PathLike, data_dir: str | os.PathLike | None) -> Any:
    """The prepared dataset, or an error that says where it was looked for and how to make it."""
    tensorflow_datasets = optional_import("tensorflow_datasets", "reading TFDS datasets", "tfds")
    folder = Path(dataset)
    if (folder / "dataset_info.json").is_file():
        return tensorflow_datasets.builder_from_directory(folder)
    if folder.is_absolute() or len(folder.parts) > 2:  # names have one slash at most: dataset/config
        raise FileNotFoundError(
            f"no prepared TFDS dataset at {folder}: it has no dataset_info.json; "
            "name the folder of one version, such as .../cifar10/3.0.2"
        )
    try:
        builder = tensorflow_datasets.builder(str(dataset), data_dir=data_dir)
    except tensorflow_datasets.core.DatasetNotFoundError as error:
        where = data_dir if data_dir is not None else "the default data_dir"
        raise ValueError(
            f"{str(dataset)!r} is not a TensorFlow dataset, nor prepared in {where}; check the name and data_dir="
        ) from error
    if not builder.is_prepared():
        raise FileNotFoundError(
            f"TFDS dataset {str(dataset)!r} is not prepared: nothing at {builder.data_dir}. "
            "Prepare it once, with TensorFlow installed in an environment of its own (training never imports it): "
            f"python -c \"import tensorflow_datasets as tfds; tfds.builder('{dataset}', file_format='array_record'"
            + (f", data_dir='{data_dir}'" if data_dir is not None else "")
            + ').download_and_prepare()"'
        )
    return builder


def _records(builder: Any, split: str, image_key: str) -> Sequence[Example]:
    """Random access to the split. Images stay encoded: TFDS would use OpenCV or Pillow, whichever is installed."""
    from tensorflow_datasets import decode as decoding
    from tensorflow_datasets import features

    decoders = None
    if isinstance(builder.info.features[image_key], features.Image):
        decoders = {image_key: decoding.SkipDecoding()}
    try:
        return builder.as_data_source(split, decoders=decoders)
    except NotImplementedError as error:
        raise ValueError(
            f"{builder.data_dir} is stored as {builder.info.file_format.value}, which only TensorFlow reads; "
            "prepare it again with file_format='array_record' in another data_dir"
        ) from error
    except ValueError as error:
        raise ValueError(f"no split {split!r} in {builder.info.full_name}: {error}") from error


def _pixels(image: bytes | np.ndarray, name: str, max_pixels: int) -> np.ndarray:
    """uint8 or float32 [h w c] from the bytes of an image file or a Tensor feature."""
    if isinstance(image, bytes):
        return decode(image, name, max_pixels)
    image = image[..., None] if image.ndim == 2 else image
    if image.ndim != 3 or image.dtype not in (np.uint8, np.float32):
        raise ValueError(
            f"{name} has an image of shape {image.shape} and {image.dtype}; it must be uint8 or float32 [h w c]"
        )
    return image


def _captions(records: Sequence[Example], key: str | None) -> tuple[tuple[str, ...], list[int]]:
    numbers: dict[str, int] = {}
    if key is None:
        return (), []
    ids = [numbers.setdefault(records[index][key].decode("utf-8"), len(numbers)) for index in range(len(records))]
    return tuple(numbers), ids


def _fingerprint(builder: Any, split: str, size: int) -> str:
    """sha256 over name, version, split and every shard's length: what TFDS itself identifies a dataset by."""
    splits = {name: [list(info.shard_lengths), int(info.num_bytes)] for name, info in builder.info.splits.items()}
    return hashlib.sha256(
        json.dumps([builder.info.full_name, split, size, splits], sort_keys=True).encode()
    ).hexdigest()
