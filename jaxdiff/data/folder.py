"""A folder of images: one class per sub-folder, or flat, with captions if there is a captions file."""

from __future__ import annotations

import csv
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from jaxdiff.data.examples import Example, Source
from jaxdiff.data.transforms import decode

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
CAPTION_FILES = ("captions.json", "captions.csv", "captions.tsv")


def folder(path: str | os.PathLike, *, captions: str | os.PathLike | None = None) -> Source:
    """Images below `path`, in the order of their names. Sub-folders are classes, numbered by sorted name.

    Captions come from `captions`, or from a captions.json {file: caption} or captions.csv / .tsv (file, caption) in
    the folder; files are named relative to it. Images become RGB unless channels=1.
    """
    root = Path(path)
    if not root.is_dir():
        raise FileNotFoundError(f"no image folder at {root}; tried {root.resolve()}")
    found = sorted(_image_files(root, ""))
    if not found:
        raise ValueError(
            f"no images in {root.resolve()} or its sub-folders; looked for files ending in {' '.join(SUFFIXES)}"
        )
    files = [file for file, _ in found]
    classes = _classes(root, files)
    unique, caption_ids = _captions(root, files, captions)
    labels = {name: number for number, name in enumerate(classes)}

    def read(index: int) -> Example:
        file = files[index]
        example: Example = {"image": decode((root / file).read_bytes(), str(root / file))}
        if classes:
            example["label"] = labels[file.split("/", 1)[0]]
        if unique:
            example["caption_id"] = caption_ids[index]
        return example

    return Source(
        name=f"folder/{root.resolve().name}",
        size=len(files),
        read=read,
        describe=lambda index: str(root / files[index]),
        fingerprint=hashlib.sha256(json.dumps([found, unique, caption_ids]).encode()).hexdigest(),
        channels=3,
        num_classes=len(classes),
        class_names=classes,
        captions=unique,
    )


def _image_files(folder: Path, prefix: str) -> Iterator[tuple[str, int]]:
    """(relative name with /, bytes) of every image, except hidden files and folders."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                yield from _image_files(Path(entry.path), f"{prefix}{entry.name}/")
            elif entry.name.lower().endswith(SUFFIXES):
                yield prefix + entry.name, entry.stat().st_size


def _classes(root: Path, files: list[str]) -> tuple[str, ...]:
    """The sub-folders that hold images; none for a flat folder. Both at once is ambiguous."""
    loose = [file for file in files if "/" not in file]
    if len(loose) == len(files):
        return ()
    if loose:
        raise ValueError(
            f"{root.resolve()} has images ({loose[0]!r} and {len(loose) - 1} more) next to class folders; "
            "move them into a class folder, or all images into one flat folder"
        )
    return tuple(sorted({file.split("/", 1)[0] for file in files}))


# ---------------------------------------------------------------------------------------------- captions


def _captions(root: Path, files: list[str], given: str | os.PathLike | None) -> tuple[tuple[str, ...], list[int]]:
    """The distinct captions in order of appearance, and the index of each image's caption."""
    paths = [root / name for name in CAPTION_FILES if (root / name).is_file()]
    if given is not None:
        paths = [Path(given)]
    if not paths:
        return (), []
    if not paths[0].is_file():
        raise FileNotFoundError(f"no captions file at {paths[0]}; tried {paths[0].resolve()}")
    table = _read_captions(paths[0])
    missing = [file for file in files if file not in table]
    if missing:
        some = ", ".join(missing[:5]) + (" ..." if len(missing) > 5 else "")
        raise ValueError(f"{paths[0]} has no caption for {len(missing)} of {len(files)} images: {some}")
    numbers: dict[str, int] = {}
    ids = [numbers.setdefault(table[file], len(numbers)) for file in files]
    return tuple(numbers), ids


def _read_captions(path: Path) -> dict[str, str]:
    if path.suffix == ".json":
        table = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(table, dict) or not all(isinstance(text, str) for text in table.values()):
            raise ValueError(f"{path} must hold one object that maps file names to caption strings")
        return table
    if path.suffix not in (".csv", ".tsv"):
        raise ValueError(f"captions must be a .json, .csv or .tsv file, got {path.name!r}")
    with path.open(encoding="utf-8", newline="") as lines:
        rows = [row for row in csv.reader(lines, delimiter="\t" if path.suffix == ".tsv" else ",") if row]
    for number, row in enumerate(rows):
        if len(row) != 2:
            raise ValueError(
                f"row {number + 1} of {path} has {len(row)} fields, not file and caption; "
                "quote captions that contain the separator"
            )
    return dict(rows)  # a header row matches no image
