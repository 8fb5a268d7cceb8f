"""Sources of examples and two ways to fetch them: batches from memory, or single examples with a transform.

Both are functions of positions in the endless order and of the seed alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float32, Shaped

from jaxdiff.conditions import Signal
from jaxdiff.data import transforms
from jaxdiff.data.order import Order, random_flips
from jaxdiff.data.transforms import CorruptImage, Transform

Batch: TypeAlias = dict[str, np.ndarray]  # arrays with one row per example
Example: TypeAlias = dict[str, Any]  # image, label, caption_id, control values
Fetch = Callable[[range, Executor | None], Batch]
Reader = Callable[[int], Example | None]
REDRAW = 2**40  # position + k * REDRAW is the k-th replacement for a corrupt example at that position
MAX_REDRAWS = 100
FEW_CORRUPT = 10  # corrupt examples that are tolerated whatever the size of the dataset


class Source(NamedTuple):
    """Examples by index: `read(i)` gives {"image": uint8 or float32 [h w c], "label": int, "caption_id": int}.

    `read` raises CorruptImage if it fails, and omits keys without values.
    `arrays` holds the same keys for all examples if they are in memory. num_classes is 0 for unlabelled data.
    `describe(i)` names an example in messages; `channels` is the default number of channels, None that of the files.
    `null` holds null values by key, where the data define them. `judge(images, captions)` measures how well images
    match captions, where that can be computed. `latent` is the (scale, shift) of latents, which are neither cropped
    nor flipped.
    `signals` declares further conditions that `read` returns. `skipped` says which examples were left out and why,
    `notes` what else the user should know; both are logged.
    """

    name: str
    size: int
    read: Callable[[int], Example]
    describe: Callable[[int], str]
    fingerprint: str
    channels: int | None = None
    num_classes: int = 0
    class_names: tuple[str, ...] = ()
    captions: tuple[str, ...] = ()
    arrays: Mapping[str, np.ndarray] = MappingProxyType({})
    null: Mapping[str, np.ndarray] = MappingProxyType({})
    judge: Callable[[np.ndarray, Sequence[str]], dict[str, float]] | None = None
    latent: tuple[float, float] | None = None
    signals: Mapping[str, Signal] = MappingProxyType({})
    skipped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def to_float(images: Shaped[np.ndarray, "b ..."]) -> Float32[np.ndarray, "b ..."]:
    """uint8 to float32 in [-1, 1], 255 exactly at 1; floats are in that range already."""
    if images.dtype != np.uint8:
        return images.astype(np.float32, copy=False)
    images = images.astype(np.float32)
    images /= 127.5
    images -= 1
    return images


def widen(values: np.ndarray) -> np.ndarray:
    """Half precision as float32; other dtypes unchanged."""
    return values.astype(np.float32) if values.dtype == np.float16 else values


# ---------------------------------------------------------------------------------------------- in memory


def keeps_frame(source: Source, transform: Transform, control: tuple[str, ...]) -> bool:
    """Whether images in memory are used uncropped, so that batches can be gathered by one indexing operation."""
    shape = source.arrays["image"].shape[1:]
    if len(shape) != 3:
        if transform.size is not None or transform.flip or control or transform.channels is not None:
            raise ValueError(
                f"dataset {source.name!r} holds points of shape {shape}, not images: "
                "remove image_size, crop, flip, channels and control"
            )
        return True
    same_size = transform.size is None or shape[:2] == (transform.size, transform.size)
    return same_size and transform.channels in (None, shape[2])


def gather(source: Source, look_up: Order, flip: bool, control: tuple[str, ...], seed: int) -> Fetch:
    """Batches by one indexing operation: over ten times faster than single examples."""

    def fetch(positions: range, executor: Executor | None) -> Batch:
        where = np.arange(positions.start, positions.stop)
        indices = look_up(where)
        batch: Batch = {key: widen(values[indices]) for key, values in source.arrays.items()}
        flipped = random_flips(seed, where) if flip else np.zeros(len(where), bool)
        if flip:
            batch["image"][flipped] = batch["image"][flipped][:, :, ::-1]
        batch["image"] = to_float(batch["image"])
        if control:
            batch |= _whole_record(batch["image"].shape[1:3], flipped, control)
        return batch

    return fetch


def _whole_record(size: tuple[int, int], flipped: np.ndarray, control: tuple[str, ...]) -> dict[str, np.ndarray]:
    """The control values of uncropped images, which differ only in the flip."""
    alike = {"original_size": size, "crop": (0, 0), "aspect": (size[1] / size[0],), "resized_size": size}
    values = {name: np.tile(np.asarray(value, np.float32), (len(flipped), 1)) for name, value in alike.items()}
    values["flip"] = flipped[:, None].astype(np.float32)
    return {name: values[name] for name in control}


# ---------------------------------------------------------------------------------------------- example by example


def check_share(source: Source, corrupt: int, max_corrupt: float) -> None:
    """Raise if too many examples are corrupt or were left out: such data are not those that were meant."""
    size, lost = source.size + len(source.skipped), corrupt + len(source.skipped)
    if lost > max(FEW_CORRUPT, max_corrupt * size):
        raise CorruptImage(
            f"{lost} of {size} examples of {source.name!r} cannot be read, more than max_corrupt={max_corrupt}; is the "
            "copy complete? Repair it, or raise data.options.max_corrupt"
        )


def reader_of(
    source: Source, skip: bool, corrupt: dict[str, int], log: Callable[[str], None], max_corrupt: float
) -> Reader:
    """`source.read` with values checked and the policy for corrupt files: None, counted, or the error."""
    lock = threading.Lock()

    def note(name: str, error: CorruptImage) -> None:
        with lock:
            corrupt[name] = corrupt.get(name, 0) + 1
            if corrupt[name] == 1:
                log(f"{error}; skipped, replaced by another example")
                check_share(source, len(corrupt), max_corrupt)

    def read(index: int) -> Example | None:
        try:
            example = source.read(index)
        except CorruptImage as error:
            if not skip:
                raise CorruptImage(
                    f"{error}; remove or repair it, or set on_corrupt='skip' to train without it"
                ) from error
            note(source.describe(index), error)
            return None
        if "label" in example and not 0 <= example["label"] < source.num_classes:
            raise ValueError(bad_label(int(example["label"]), source.describe(index), source.num_classes))
        _check_floats(example["image"], source.describe(index))
        return {**example, "index": index}

    return read


def _check_floats(image: np.ndarray, name: str) -> None:
    """Floats are finite, and pixels in [-1, 1]; latents may be larger, but are not all positive."""
    if image.dtype == np.uint8 or not image.size:
        return
    low, high = image.min(), image.max()
    if not np.isfinite(high - low) or (low >= 0 and high > 2):
        raise ValueError(
            f"{name} has values from {low:.4g} to {high:.4g}; floats must be finite and pixels lie in [-1, 1]: use "
            "x / 127.5 - 1 for 0..255"
        )


def bad_label(label: int, name: str, num_classes: int) -> str:
    """The message for an invalid label."""
    allowed = f"labels of {num_classes} classes lie in [0, {num_classes})"
    return f"{name} has label {label}, but {allowed}; correct the label or num_classes"


def first_shape(source: Source, reader: Reader, transform: Transform) -> tuple[int, ...]:
    """The shape of the first readable example after the transform, which every other one must share."""
    for index in range(min(source.size, MAX_REDRAWS)):
        example = reader(index)
        if example is not None:
            image, _ = transforms.apply(transform, example["image"], np.random.default_rng(0), source.describe(index))
            return image.shape
    raise CorruptImage(_all_corrupt(source, 0))


def _all_corrupt(source: Source, index: int) -> str:
    what = f"none of {min(source.size, MAX_REDRAWS)} examples of {source.name!r} in a row could be read"
    return f"{what}, the first is {source.describe(index)}; is the copy complete?"


def per_example(
    source: Source,
    reader: Reader,
    look_up: Order,
    transform: Transform,
    shape: tuple[int, ...],
    control: tuple[str, ...],
    seed: int,
) -> Fetch:
    """Grain's random-access pipeline, one example at a time; `random_map` seeds its generator with (seed, position)."""
    import grain

    def example_at(position: int) -> int:
        redraw, position = divmod(position, REDRAW)
        slot = position % source.size
        return int(look_up(np.asarray([position - slot + (slot + redraw) % source.size]))[0])

    def augment(example: Example, rng: np.random.Generator) -> Example:
        name = source.describe(example["index"])
        image, record = transforms.apply(transform, example["image"], rng, name)
        if image.shape != shape:
            raise ValueError(
                f"{name} has shape {image.shape} where the first example of {source.name!r} has {shape}; "
                "set image_size= (with crop=) to resize images to one size, channels=1 or 3 for one colour mode"
            )
        return {**example, "image": image, **record}

    pipeline = grain.MapDataset.range(2**62).seed(seed).map(example_at).map(reader).random_map(augment)

    def one(position: int) -> Example:
        for redraw in range(min(source.size, MAX_REDRAWS)):
            example = pipeline[position + redraw * REDRAW]
            if example is not None:
                return example
        raise CorruptImage(_all_corrupt(source, example_at(position)))

    def fetch(positions: range, executor: Executor | None) -> Batch:
        examples = executor.map(one, positions) if executor else map(one, positions)
        return _collate(list(examples), (*control, *source.signals))

    return fetch


def _collate(examples: list[Example], signals: tuple[str, ...]) -> Batch:
    batch: Batch = {"image": to_float(np.stack([example["image"] for example in examples]))}
    for key in ("label", "caption_id"):
        if key in examples[0]:
            batch[key] = np.asarray([example[key] for example in examples], np.int32)
    for name in signals:
        batch[name] = np.asarray([example[name] for example in examples], np.float32)
    return batch
