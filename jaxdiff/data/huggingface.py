"""Images of Hugging Face datasets: their Parquet or Arrow files, in a local folder or at hf://datasets/owner/repo."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxdiff.data.examples import Example, Source
from jaxdiff.data.transforms import MAX_PIXELS, CorruptImage, decode
from jaxdiff.errors import nearest, optional_import

if TYPE_CHECKING:
    from pyarrow import Table

SUFFIXES = (".parquet", ".arrow")


def huggingface(
    path: str | os.PathLike,
    *,
    split: str = "train",
    image: str = "image",
    label: str = "label",
    caption: str = "",
    max_pixels: int = MAX_PIXELS,
) -> Source:
    """The rows of the files below `path` whose name or folder is that of a split, such as train-00000-of-00001.parquet.

    `image`, `label` and `caption` are columns: encoded images, whole numbers with or without class names, text. A
    column `label` that is not there is none. Arrow files are mapped; the encoded images of Parquet files are held in
    memory, so convert a set that does not fit with `data.write_array_records`.
    """
    files = _files(Path(path), split)
    table = _table(files, [image, label, caption])
    pixels = table.column(_present(table, image, files)).combine_chunks()
    labels, names = _labels(table, label, files)
    unique, caption_ids = _captions(table, caption, files)

    def describe(index: int) -> str:
        return f"row {index} of {Path(path).name}, split {split!r}"

    def read(index: int) -> Example:
        value = pixels[index].as_py()
        content = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(content, bytes):
            raise CorruptImage(f"{describe(index)} has no encoded image in the column {image!r}")
        example: Example = {"image": decode(content, describe(index), max_pixels)}
        if labels is not None:
            example["label"] = int(labels[index])
        if unique:
            example["caption_id"] = caption_ids[index]
        return example

    about = [[file.name, file.stat().st_size] for file in files]
    known = [about, [image, label, caption], names, unique]
    return Source(
        name=f"huggingface/{Path(path).name}",
        size=table.num_rows,
        read=read,
        describe=describe,
        fingerprint=hashlib.sha256(json.dumps(known).encode()).hexdigest(),
        channels=3,
        num_classes=0 if labels is None else max(len(names), int(labels.max()) + 1),
        class_names=names,
        captions=unique,
    )


def _files(root: Path, split: str) -> list[Path]:
    """The files of a split: called SPLIT-..., SPLIT., or in a folder SPLIT."""
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise FileNotFoundError(f"no dataset at {root}; tried {root.resolve()}")
    found = sorted(path for path in root.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    if not found:
        raise FileNotFoundError(f"no {' or '.join(SUFFIXES)} files below {root.resolve()}")
    chosen = [path for path in found if _split_of(path, root) == split]
    if not chosen:
        known = sorted({_split_of(path, root) for path in found})
        raise ValueError(f"no split {split!r} below {root}{nearest(split, known)}; choose one of {', '.join(known)}")
    return chosen


def _split_of(path: Path, root: Path) -> str:
    """train of train-00000-of-00002.parquet; of data-00000-of-00001.arrow and 0000.parquet, the name of the folder."""
    name = path.stem.split("-")[0]
    return path.parent.name if (name in ("data", "dataset") or name.isdigit()) and path.parent != root else name


def _table(files: list[Path], columns: list[str]) -> Table:
    """Those of the columns that the files have; without the first one, which is needed, all that they have."""
    pyarrow = optional_import("pyarrow", "data.source='huggingface'", "hub")
    parquet = optional_import("pyarrow.parquet", "data.source='huggingface'", "hub")
    tables = []
    for file in files:
        try:
            if file.suffix == ".arrow":
                table = _arrow(pyarrow, file)
            else:
                have = parquet.read_schema(file).names
                wanted = [name for name in have if name in columns]
                table = parquet.read_table(file, columns=wanted if columns[0] in have else have)
        except (pyarrow.ArrowException, OSError) as error:
            cause = str(error).splitlines()[0][:200]
            raise ValueError(f"{file} is no {file.suffix} file of a dataset, or damaged: {cause}") from error
        tables.append(table)
    try:
        return pyarrow.concat_tables(tables)
    except pyarrow.ArrowException as error:
        raise ValueError(f"the files below {files[0].parent} have different columns: {error}") from error


def _arrow(pyarrow: Any, file: Path) -> Table:
    """A mapped file, in either of Arrow's formats."""
    mapped = pyarrow.memory_map(str(file))
    try:
        return pyarrow.ipc.open_stream(mapped).read_all()
    except pyarrow.ArrowInvalid:
        mapped.seek(0)
        return pyarrow.ipc.open_file(mapped).read_all()


def _present(table: Table, name: str, files: list[Path]) -> str:
    if name not in table.column_names:
        known = table.column_names
        raise ValueError(f"{files[0]} has no column {name!r}{nearest(name, known)}; it has {', '.join(known)}")
    return name


def _labels(table: Table, name: str, files: list[Path]) -> tuple[np.ndarray | None, tuple[str, ...]]:
    """The labels and the names of the classes, where there are any."""
    if not name or (name == "label" and name not in table.column_names):
        return None, ()
    column = table.column(_present(table, name, files))
    labels = np.asarray(column.to_numpy())
    if labels.dtype.kind not in "iu" or (len(labels) and labels.min() < 0):
        raise ValueError(f"{files[0]}: the column {name!r} must hold class numbers from 0, got {column.type}")
    about = (table.schema.metadata or {}).get(b"huggingface", b"{}")
    try:
        names = json.loads(about)["info"]["features"][name]["names"]
        return labels, tuple(map(str, names))
    except (ValueError, KeyError, TypeError):
        return labels, ()


def _captions(table: Table, name: str, files: list[Path]) -> tuple[tuple[str, ...], list[int]]:
    """The distinct captions, and the index of each row's."""
    if not name:
        return (), []
    numbers: dict[str, int] = {}
    texts = table.column(_present(table, name, files)).to_pylist()
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{files[0]}: the column {name!r} must hold one text per row")
    ids = [numbers.setdefault(text, len(numbers)) for text in texts]
    return tuple(numbers), ids
