"""Array records written by `write_array_records`: random access to one large file, without pickle.

A record is  uint32 length of the header (little endian) | header, JSON | image bytes.  The header holds the image's
dtype and shape, or {"encoded": true} for the bytes of an image file, and label and caption id. The last record of
each file is JSON alone: format, count, classes, captions, sha256 of the records.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import math
import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxdiff.data.examples import Example, Source, bad_label
from jaxdiff.data.transforms import MAX_PIXELS, CorruptImage, decode
from jaxdiff.files import replacing

FORMAT = "jaxdiff-array-record-1"
SUFFIX = ".array_record"
KEYS = {"image", "label", "caption"}


def write_array_records(
    path: str | os.PathLike,
    examples: Iterable[Example],
    *,
    num_classes: int = 0,
    class_names: Sequence[str] = (),
    latent: tuple[float, float] | None = None,
) -> int:
    """Write {"image": ..., "label": int, "caption": str} per example; returns their number.

    An image is a uint8 or float32 [h w c] array or the bytes of an image file. Labels require
    num_classes or class_names. `latent` = (scale, shift) marks float32 images as latents. Writing is atomic.
    """
    from array_record.python.array_record_module import ArrayRecordWriter

    path = Path(path)
    if path.suffix != SUFFIX:
        raise ValueError(f"cannot write array records to {path.name!r}: the name must end in {SUFFIX}")
    num_classes = num_classes or len(class_names)
    with replacing(path) as partial:
        writer = ArrayRecordWriter(str(partial), "group_size:1")  # one record per group: whole groups are read
        try:
            end = _write_all(writer, examples, num_classes)
            end |= {"num_classes": num_classes, "class_names": list(class_names)}
            if latent is not None:
                end["latent"] = {"scale": float(latent[0]), "shift": float(latent[1])}
            writer.write(json.dumps(end).encode())
        finally:
            writer.close()
    return end["count"]


def _write_all(writer: Any, examples: Iterable[Example], num_classes: int) -> dict[str, Any]:
    """Write all examples; the fields of the last record that follow from them."""
    captions: dict[str, int] = {}
    digest, count, keys = hashlib.sha256(), 0, None
    for count, example in enumerate(examples, 1):
        keys = set(example) if keys is None else keys
        if set(example) != keys or not {"image"} <= keys <= KEYS:
            raise ValueError(
                f"example {count - 1} has keys {sorted(example)}; all need 'image', and all or none 'label', 'caption'"
            )
        record = _encode(example, f"example {count - 1}", num_classes, captions)
        digest.update(record)
        writer.write(record)
    return {"format": FORMAT, "count": count, "captions": list(captions), "sha256": digest.hexdigest()}


def _encode(example: Example, name: str, num_classes: int, captions: dict[str, int]) -> bytes:
    image, header = example["image"], Example()
    if isinstance(image, bytes):
        header["encoded"] = True
    else:
        image = np.asarray(image)
        if image.ndim != 3 or image.dtype not in (np.uint8, np.float32):
            raise ValueError(
                f"{name} has an image of shape {image.shape} and {image.dtype}; "
                "store uint8 or float32 [h w c], or the bytes of an image file"
            )
        header |= {"dtype": str(image.dtype), "shape": image.shape}
        image = image.astype(image.dtype.newbyteorder("<")).tobytes()
    if "label" in example:
        header["label"] = int(example["label"])
        if not num_classes:
            raise ValueError(f"{name} has a label: pass num_classes= or class_names=, so that readers can check labels")
        if not 0 <= header["label"] < num_classes:
            raise ValueError(bad_label(header["label"], name, num_classes))
    if "caption" in example:
        header["caption_id"] = captions.setdefault(str(example["caption"]), len(captions))
    text = json.dumps(header).encode()
    return struct.pack("<I", len(text)) + text + image


def _decode(record: bytes, name: str, max_pixels: int) -> Example:
    try:
        (length,) = struct.unpack_from("<I", record)
        header = json.loads(record[4 : 4 + length])
        body = record[4 + length :]
        example = {key: header[key] for key in ("label", "caption_id") if key in header}
        if header.get("encoded"):
            return {"image": decode(body, name, max_pixels), **example}
        dtype = np.dtype(header["dtype"]).newbyteorder("<")
        return {"image": np.frombuffer(body, dtype, math.prod(header["shape"])).reshape(header["shape"]), **example}
    except CorruptImage:
        raise
    except Exception as error:
        raise CorruptImage(f"cannot decode {name} ({len(record)} bytes): {error}") from error


# ---------------------------------------------------------------------------------------------- reading


def array_records(path: str | os.PathLike | Sequence[str | os.PathLike], *, max_pixels: int = MAX_PIXELS) -> Source:
    """The examples of one file, several files, or all `*.array_record` files of a folder in order of name.

    Encoded images of more than `max_pixels` are not decoded.
    """
    files = _files(path)
    shards = [_open(file) for file in files]
    ends = [end for _, end in shards]
    if any(
        [end.get(key) for key in ("class_names", "num_classes", "latent")]
        != [ends[0].get(key) for key in ("class_names", "num_classes", "latent")]
        for end in ends
    ):
        names = ", ".join(file.name for file in files)
        raise ValueError(f"the files {names} differ in their classes, or in being latents; load them separately")
    starts = list(itertools.accumulate((end["count"] for end in ends), initial=0))
    first_caption = list(itertools.accumulate((len(end["captions"]) for end in ends), initial=0))

    def place(index: int) -> tuple[int, int]:
        shard = bisect.bisect_right(starts, index) - 1
        return shard, index - starts[shard]

    def describe(index: int) -> str:
        shard, row = place(index)
        return f"record {row} of {files[shard]}"

    def read(index: int) -> Example:
        shard, row = place(index)
        try:
            record = shards[shard][0][row]
        except RuntimeError as error:  # checksum mismatch
            raise CorruptImage(f"cannot read {describe(index)}: {error}") from error
        example = _decode(record, describe(index), max_pixels)
        if "caption_id" in example:
            example["caption_id"] += first_caption[shard]
        return example

    units = ends[0].get("latent")
    return Source(
        name=f"array_records/{files[0].name}" + (f" +{len(files) - 1}" if len(files) > 1 else ""),
        size=starts[-1],
        read=read,
        describe=describe,
        fingerprint=hashlib.sha256(json.dumps(ends, sort_keys=True).encode()).hexdigest(),
        num_classes=ends[0]["num_classes"],
        class_names=tuple(ends[0]["class_names"]),
        captions=tuple(itertools.chain.from_iterable(end["captions"] for end in ends)),
        latent=None if units is None else (units["scale"], units["shift"]),
    )


def _files(path: str | os.PathLike | Sequence[str | os.PathLike]) -> list[Path]:
    paths = [Path(path)] if isinstance(path, (str, os.PathLike)) else [Path(each) for each in path]
    if len(paths) == 1 and paths[0].is_dir():
        found = sorted(paths[0].glob(f"*{SUFFIX}"))
        if not found:
            raise FileNotFoundError(f"no *{SUFFIX} files in {paths[0].resolve()}; write_array_records creates them")
        return found
    for each in paths:
        if not each.is_file():
            raise FileNotFoundError(f"no array records at {each}; tried {each.resolve()}")
    return paths


def _open(file: Path) -> tuple[Any, dict[str, Any]]:
    """The records and the last one, parsed."""
    from grain.sources import ArrayRecordDataSource

    try:
        records = ArrayRecordDataSource(str(file))
        end = json.loads(records[len(records) - 1])
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"{file} is not a complete file of data.write_array_records: {error or 'truncated'}"
        ) from error
    if not isinstance(end, dict) or end.get("format") != FORMAT or end.get("count") != len(records) - 1:
        raise ValueError(
            f"{file} does not end in a {FORMAT} record; for files prepared by TensorFlow Datasets use the source 'tfds'"
        )
    return records, end
