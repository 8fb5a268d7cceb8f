"""A folder of images: one class per sub-folder, or flat, with captions if there is a captions file."""

from __future__ import annotations

import csv
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from jaxdiff.data.examples import Example, Source
from jaxdiff.data.transforms import MAX_PIXELS, CorruptImage, decode

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
CAPTION_FILES = ("captions.json", "captions.csv", "captions.tsv")


def folder(
    path: str | os.PathLike, *, captions: str | os.PathLike | None = None, max_pixels: int = MAX_PIXELS
) -> Source:
    """Images below `path`, in the order of their names. Sub-folders are classes, numbered by sorted name.

    Captions come from `captions`, or from a captions.json {file: caption} or captions.csv / .tsv (file, caption) in
    the folder; files are named relative to it. Images become RGB unless channels=1; those of more than `max_pixels`
    are not decoded. Links that lead nowhere or to a folder above them are left out and reported.
    """
    root = Path(path)
    if not root.is_dir():
        raise FileNotFoundError(f"no image folder at {root}; tried {root.resolve()}")
    skipped: list[str] = []
    found = sorted(_image_files(root, "", frozenset(), skipped))
    if not found:
        raise ValueError(
            f"no images in {root.resolve()} or its sub-folders; looked for files ending in {' '.join(SUFFIXES)}"
        )
    files = [file for file, _ in found]
    classes = _classes(root, files)
    notes = _empty_classes(root, classes) if classes else []
    unique, caption_ids = _captions(root, files, captions, notes)
    labels = {name: number for number, name in enumerate(classes)}

    def read(index: int) -> Example:
        file = files[index]
        try:
            content = (root / file).read_bytes()
        except OSError as error:  # vanished, or not readable, since the folder was listed
            raise CorruptImage(f"cannot read {root / file}: {error.strerror or error}") from error
        example: Example = {"image": decode(content, str(root / file), max_pixels)}
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
        skipped=tuple(skipped),
        notes=tuple(notes),
    )


def _image_files(
    folder: Path, prefix: str, above: frozenset[tuple[int, int]], skipped: list[str]
) -> Iterator[tuple[str, int]]:
    """(relative name with /, bytes) of every image, except hidden files and folders; unusable links go to `skipped`.

    `above` identifies the folders that this one is in.
    """
    try:
        here, entries = folder.stat(), sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise OSError(f"cannot list the image folder {folder}: {error.strerror or error}; make it readable") from error
    if (here.st_dev, here.st_ino) in above:
        skipped.append(f"{folder} leads back to a folder that it is in")
        return
    above |= {(here.st_dev, here.st_ino)}
    for entry in entries:
        if entry.name.startswith("."):
            continue
        try:
            if entry.is_dir():
                yield from _image_files(Path(entry.path), f"{prefix}{entry.name}/", above, skipped)
            elif entry.name.lower().endswith(SUFFIXES):
                yield prefix + entry.name, entry.stat().st_size
        except OSError as error:
            if error.errno is None:  # a folder inside it that cannot be listed
                raise
            skipped.append(f"cannot read {entry.path}: {error.strerror}")


def _empty_classes(root: Path, classes: tuple[str, ...]) -> list[str]:
    """A note about sub-folders without images, which are no classes."""
    empty = sorted({path.name for path in root.iterdir() if path.is_dir() and path.name[0] != "."} - set(classes))
    if not empty:
        return []
    return [f"{len(empty)} folders of {root} have no images and are no classes: {_some(empty)}"]


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (" ..." if len(names) > 5 else "")


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


def _captions(
    root: Path, files: list[str], given: str | os.PathLike | None, notes: list[str]
) -> tuple[tuple[str, ...], list[int]]:
    """The distinct captions in order of appearance, and the index of each image's caption."""
    paths = [root / name for name in CAPTION_FILES if (root / name).is_file()]
    if given is not None:
        paths = [Path(given)]
    if not paths:
        return (), []
    if not paths[0].is_file():
        raise FileNotFoundError(f"no captions file at {paths[0]}; tried {paths[0].resolve()}")
    rows = _read_captions(paths[0])
    table = dict(rows)
    missing = [file for file in files if file not in table]
    if missing:
        raise ValueError(f"{paths[0]} has no caption for {len(missing)} of {len(files)} images: {_some(missing)}")
    twice = sorted(name for name, count in Counter(name for name, _ in rows).items() if count > 1)
    if twice:
        notes.append(f"{paths[0]} has several captions for {len(twice)} files, the last is used: {_some(twice)}")
    numbers: dict[str, int] = {}
    ids = [numbers.setdefault(table[file], len(numbers)) for file in files]
    return tuple(numbers), ids


def _read_captions(path: Path) -> list[tuple[str, str]]:
    """(file, caption) of every row."""
    if path.suffix == ".json":
        try:
            pairs = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=tuple)
        except ValueError as error:
            raise ValueError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(pairs, tuple) or not all(isinstance(text, str) for _, text in pairs):
            raise ValueError(f"{path} must hold one object that maps file names to caption strings")
        return list(pairs)
    if path.suffix not in (".csv", ".tsv"):
        raise ValueError(f"captions must be a .json, .csv or .tsv file, got {path.name!r}")
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            rows = [row for row in csv.reader(lines, delimiter="\t" if path.suffix == ".tsv" else ",") if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not a table of text in UTF-8: {error}") from error
    for number, row in enumerate(rows):
        if len(row) != 2:
            raise ValueError(
                f"row {number + 1} of {path} has {len(row)} fields, not file and caption; "
                "quote captions that contain the separator"
            )
    return [(file, caption) for file, caption in rows]  # a header row matches no image
