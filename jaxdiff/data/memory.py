"""Sources that live in memory: the embedded digits and your own arrays."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from jaxdiff.data.examples import Source, bad_label
from jaxdiff.data.prompts import from_tables
from jaxdiff.errors import choose
from jaxdiff.files import read_npz

TEST_DIGITS = 297  # leaves 1,500 for training


def digits(split: str = "all") -> Source:
    """1,797 handwritten digits of 8 x 8 pixels with 17 grey levels.

    `split` is "all", "train" (1,500) or "test" (297), by one fixed permutation. They are the test part of "Optical
    Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak (UCI Machine Learning Repository, 1998, CC BY 4.0,
    archive.ics.uci.edu/dataset/80), stored unchanged in the order in which scikit-learn distributes them.
    """
    choose(split, ("all", "train", "test"), "split of the digits")
    with np.load(Path(__file__).with_name("digits.npz")) as stored:
        images, labels = stored["images"], stored["labels"]
    part = {"all": slice(None), "train": slice(TEST_DIGITS, None), "test": slice(TEST_DIGITS)}[split]
    rows = np.sort(np.random.RandomState(0).permutation(len(labels))[part])
    name = "digits" if split == "all" else f"digits/{split}"
    scaled = images[rows, :, :, None] / np.float32(8) - np.float32(1)
    return in_memory(name, scaled, labels[rows], class_names=tuple("0123456789"))


def arrays(
    images: np.ndarray | str | os.PathLike,
    labels: ArrayLike | None = None,
    *,
    num_classes: int = 0,
    class_names: Iterable[str] | None = None,
    caption_ids: ArrayLike | None = None,
    captions: Iterable[str] | None = None,
    name: str = "arrays",
) -> Source:
    """Images [n h w c] or [n h w] in memory, uint8 or float in [-1, 1]; or an .npz file with these names as keys.

    `name` is shown in reports. For latents use the source `latents`.
    """
    if isinstance(images, (str, os.PathLike)):
        if labels is not None or caption_ids is not None:
            raise ValueError(
                "put labels and caption_ids in the .npz file (keys 'labels', 'caption_ids') instead of passing them"
            )
        stored: dict[str, np.ndarray] = _read_npz(Path(images))
        images, labels, caption_ids = stored["images"], stored.get("labels"), stored.get("caption_ids")
        class_names = stored.get("class_names", ()) if class_names is None else class_names
        captions = stored.get("captions", ()) if captions is None else captions
    return in_memory(
        name,
        _check_images(np.asarray(images)),
        labels,
        num_classes,
        _strings(class_names),
        caption_ids,
        _strings(captions),
    )


def blank(shape: Sequence[int], *, num_classes: int = 0, text: Sequence[int] = (), pooled: int = 0) -> Source:
    """No data: zeros of one shape, for methods that need none, such as SFD; samples cannot be evaluated.

    `text` = (tokens, width) adds text embeddings, fixed random numbers, and `pooled` a pooled embedding of that width.
    """
    if not shape or any(int(side) != side or side < 1 for side in shape) or num_classes < 0:
        raise ValueError(f"blank needs the shape of an image, for example (32, 32, 3), got {shape} and {num_classes=}")
    if text:
        rng = np.random.default_rng(0)
        tables = {"text": rng.normal(size=(9, *text)).astype(np.float32)}
        if pooled:
            tables["pooled"] = rng.normal(size=(9, pooled)).astype(np.float32)
        return from_tables("blank", tables, shape, "blank")
    images = np.zeros(
        (max(num_classes, 1), *(int(side) for side in shape)), np.uint8 if len(shape) == 3 else np.float32
    )
    return in_memory("blank", images, np.arange(num_classes) if num_classes else None, num_classes)


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise FileNotFoundError(f"no .npz file at {path}; tried {path.resolve()}")
    stored = read_npz(path, ("images", "labels", "class_names", "caption_ids", "captions"))
    if "images" not in stored:
        keys = ", ".join(np.load(path, allow_pickle=False).files)
        raise ValueError(f"{path} has keys {keys}, but 'images' is needed ('labels' is optional)")
    return stored


def _check_images(images: np.ndarray) -> np.ndarray:
    """uint8 or float32 [n h w c]."""
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4:
        raise ValueError(f"images must have shape [n h w c] or [n h w], got {images.shape}")
    if images.dtype == np.uint8:
        return images
    if not np.issubdtype(images.dtype, np.floating):
        raise ValueError(
            f"images must be uint8 (0..255) or float in [-1, 1], got {images.dtype}; cast with images.astype(np.uint8)"
        )
    low, high = images.min(initial=0), images.max(initial=0)
    if not -1 <= low <= high <= 1:  # NaN fails too
        raise ValueError(
            f"float images must lie in [-1, 1], got values from {low:.4g} to {high:.4g}; use x / 127.5 - 1 for 0..255"
        )
    return images.astype(np.float32)


def _strings(values: Iterable[str] | None) -> tuple[str, ...]:
    return tuple(str(value) for value in values) if values is not None else ()


def in_memory(
    name: str,
    images: np.ndarray,
    labels: ArrayLike | None = None,
    num_classes: int = 0,
    class_names: tuple[str, ...] = (),
    caption_ids: ArrayLike | None = None,
    captions: tuple[str, ...] = (),
) -> Source:
    """A source over arrays of one length; labels and caption ids are validated."""
    columns = {"image": images}
    if labels is not None:
        labels = np.asarray(labels)
        num_classes = num_classes or len(class_names) or int(labels.max(initial=0)) + 1
        columns["label"] = _check_ids(name, labels, len(images), num_classes, "label")
    if caption_ids is not None:
        columns["caption_id"] = _check_ids(name, np.asarray(caption_ids), len(images), len(captions), "caption id")
    digest = hashlib.sha256()
    for key, column in columns.items():
        digest.update(f"{key} {column.dtype} {column.shape} ".encode())
        digest.update(np.ascontiguousarray(column).data)
    return Source(
        name=name,
        size=len(images),
        read=lambda i: {key: column[i] for key, column in columns.items()},
        describe=lambda i: f"example {i} of {name}",
        fingerprint=digest.hexdigest(),
        num_classes=num_classes if labels is not None else 0,
        class_names=class_names,
        captions=captions,
        arrays=columns,
    )


def _check_ids(name: str, ids: np.ndarray, size: int, count: int, what: str) -> np.ndarray:
    if ids.shape != (size,) or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"{size} images need {size} integer {what}s, got shape {ids.shape} of {ids.dtype}")
    bad = np.flatnonzero((ids < 0) | (ids >= count))
    if len(bad):
        where = f"example {bad[0]} of {name} (and {len(bad) - 1} more)"
        if what == "label":
            raise ValueError(bad_label(int(ids[bad[0]]), where, count))
        raise ValueError(f"{where} has {what} {ids[bad[0]]}, but there are {count} captions")
    return ids.astype(np.int32)
