"""Datasets: a source with an order and a transform, and from them the batch of any step.

The batch of step s is a pure function of (seed, s). Positions s*B .. (s+1)*B of an endless order, reshuffled every
epoch, make the global batch; process p of P reads the p-th contiguous slice of it. Augmentation is a function of
(seed, position). Resuming needs only the step number, and the order does not depend on the number of processes.

    batch = {"image": float32 [b h w c] in [-1, 1], "label": int32 [b], "caption_id": int32 [b],
             "text": float32 [b l d], "text_mask": bool [b l], "pooled": float32 [b d],
             "original_size": float32 [b 2], "crop": [b 2], "flip": [b 1], "aspect": [b 1], "resized_size": [b 2],
             "augment": float32 [b 9]}

Keys that a source has no values for are absent; control metadata (the last lines) is present where requested.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor

import numpy as np

from jaxdiff.conditions import CONTROL, CONTROLS, Signal, label_signal
from jaxdiff.data import augment as augmentation
from jaxdiff.data import transforms
from jaxdiff.data.captions import embed, with_text
from jaxdiff.data.examples import (
    Batch,
    Fetch,
    Source,
    check_share,
    first_shape,
    gather,
    keeps_frame,
    per_example,
    reader_of,
)
from jaxdiff.data.order import order
from jaxdiff.data.spec import DataSpec
from jaxdiff.data.transforms import CorruptImage, Transform
from jaxdiff.errors import choose


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset(DataSpec):
    """Batches by step. `corrupt` counts how often this process replaced each corrupt file.

    `judge(images, captions)` measures how well images match captions, for data where that can be computed.
    """

    fetch: Fetch = dataclasses.field(kw_only=True, repr=False)
    seed: int = 0
    captions: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    judge: Callable[..., dict[str, float]] | None = dataclasses.field(default=None, repr=False)
    in_memory: bool = False
    corrupt: dict[str, int] = dataclasses.field(default_factory=dict)

    def batch(
        self,
        step: int,
        batch_size: int,
        process_index: int = 0,
        process_count: int = 1,
        *,
        executor: Executor | None = None,
    ) -> Batch:
        """This process's slice of the global batch of `batch_size` examples at `step`."""
        start, stop = local_slice(step, batch_size, process_index, process_count)
        return self.take(start, stop, executor=executor)

    def take(self, start: int, stop: int, *, executor: Executor | None = None) -> Batch:
        """The examples at positions start .. stop of the endless order; [0, size) is the first epoch."""
        if not 0 <= start < stop:
            raise ValueError(f"positions must satisfy 0 <= start < stop, got {start} .. {stop}")
        return self.fetch(range(start, stop), executor)


def local_slice(step: int, batch_size: int, process_index: int = 0, process_count: int = 1) -> tuple[int, int]:
    """The positions (start, stop) that one process reads for a step."""
    if step < 0 or batch_size < 1:
        raise ValueError(f"step must be >= 0 and batch_size >= 1, got step {step} and batch_size {batch_size}")
    if not 0 <= process_index < process_count:
        raise ValueError(f"process_index must be in [0, process_count), got {process_index} of {process_count}")
    if batch_size % process_count:
        near = max(1, round(batch_size / process_count)) * process_count
        raise ValueError(
            f"a batch of {batch_size} cannot be split over {process_count} processes; "
            f"the nearest batch size that works is {near}"
        )
    share = batch_size // process_count
    start = step * batch_size + process_index * share
    return start, start + share


def build(
    source: Source,
    *,
    seed: int = 0,
    shuffle: bool = True,
    image_size: int | None = None,
    crop: str | None = None,
    local_share: float = 0.5,
    flip: bool = False,
    resample: str = "bicubic",
    channels: int | None = None,
    augment: float = 0.0,
    control: Sequence[str] = (),
    caption_text: Sequence[int] | str | os.PathLike = (),
    pooling: str = "",
    on_corrupt: str = "skip",
    max_corrupt: float = 0.1,
    log: Callable[[str], None] | None = None,
) -> Dataset:
    """A dataset over `source`; invalid options and an unreadable first example fail here, not at the first step.

    `image_size` with `crop` (center, global, local, mixed; default center) makes square crops, without it all images
    must have one size. `augment` is the probability of each of EDM's transformations (augment.py). `control` lists the
    metadata to record (conditions.CONTROLS). `caption_text` embeds captions: (length, width) by hashed words, or a
    folder with text.npy [captions + 1 l d]; pooling="mean" makes the pooled embedding the mean over tokens.
    `on_corrupt` is "skip" (replace by the next readable example of the epoch, count, log each file once) or "stop";
    more than 10 corrupt examples that are more than `max_corrupt` of all are an error.
    """
    control = (control,) if isinstance(control, str) else tuple(control)
    _check(source, seed, shuffle, image_size, crop, control, on_corrupt, max_corrupt)
    log = log or logging.getLogger("jaxdiff.data").warning
    _report(source, on_corrupt == "skip", max_corrupt, log)
    if source.latent is not None and (image_size is not None or flip or channels is not None or control):
        raise ValueError(
            f"dataset {source.name!r} holds latents, which cannot be cropped or flipped: remove image_size, crop, "
            "flip, channels and control, and encode flipped images too"
        )
    transform = transforms.check(
        Transform(image_size, crop or "center", local_share, flip, resample, channels or source.channels)
    )
    corrupt: dict[str, int] = {}
    look_up = order(source.size, seed, shuffle)
    whole = bool(source.arrays) and keeps_frame(source, transform, control)
    if whole:
        shape, fetch = source.arrays["image"].shape[1:], gather(source, look_up, transform.flip, control, seed)
    else:
        reader = reader_of(source, on_corrupt == "skip", corrupt, log, max_corrupt)
        shape = first_shape(source, reader, transform)
        fetch = per_example(source, reader, look_up, transform, shape, control, seed)
    if pooling and not caption_text:
        raise ValueError(f"pooling={pooling!r} pools embedded captions: set caption_text too")
    augmentation.check(augment, source.name, tuple(shape), source.latent is not None)
    if augment:
        fetch = augmentation.augmented(fetch, seed, augment)
    captions = embed(source.captions, caption_text, pooling) if caption_text else None
    if captions is not None:
        fetch = with_text(fetch, captions)
    null = {**source.null, **(captions.null if captions else {})}
    dataset = Dataset(
        name=source.name,
        shape=tuple(shape),
        size=source.size,
        fingerprint=source.fingerprint,
        class_names=source.class_names,
        signals={**_signals(source.num_classes, null, control, augment), **source.signals},
        latent=source.latent,
        text=captions.encoder if captions else None,
        fetch=fetch,
        seed=seed,
        captions=source.captions,
        judge=source.judge,
        in_memory=whole,
        corrupt=corrupt,
    )
    if not null:
        return dataset
    return _with_examples(dataset, fetch(range(_EXAMPLES if whole else _FEW), None))


_EXAMPLES, _FEW = 64, 16  # examples whose text is kept for sampling: in memory, from files


def _signals(
    num_classes: int, null: Mapping[str, np.ndarray], control: Sequence[str], augment: float
) -> dict[str, Signal]:
    """The signals of the examples: their class, text with these null values, control metadata, augmentation."""
    signals = {"label": label_signal(num_classes)} if num_classes else {}
    signals |= {name: Signal(value.shape, str(value.dtype), value) for name, value in null.items()}
    signals |= {name: Signal((CONTROLS[name],), group=CONTROL) for name in control}
    return signals | ({"augment": Signal((augmentation.LABELS,), group=CONTROL)} if augment else {})


def _with_examples(dataset: Dataset, batch: Batch) -> Dataset:
    """The dataset with the text of its first examples."""
    rows: Batch = {name: np.asarray(batch[name]) for name in ("text", "text_mask", "pooled") if name in batch}
    captions: tuple[str, ...] = ()
    if dataset.captions and "caption_id" in batch:
        captions = tuple(dataset.captions[i] for i in batch["caption_id"])
    return dataclasses.replace(dataset, example_captions=captions, example_text=rows)


def _report(source: Source, skip: bool, max_corrupt: float, log: Callable[[str], None]) -> None:
    """Log what the source left out and what else it noted, or refuse it."""
    if source.skipped and not skip:
        raise CorruptImage(f"{source.skipped[0]}; remove or repair it, or set on_corrupt='skip' to train without it")
    check_share(source, 0, max_corrupt)
    for text in (*(f"{reason}; skipped" for reason in source.skipped), *source.notes):
        log(text)


def _check(
    source: Source,
    seed: int,
    shuffle: bool,
    image_size: int | None,
    crop: str | None,
    control: tuple[str, ...],
    on_corrupt: str,
    max_corrupt: float,
) -> None:
    if not isinstance(shuffle, (bool, np.bool_)):
        raise ValueError(f"shuffle is True or False, got {shuffle!r}")
    if not 0 <= max_corrupt <= 1:
        raise ValueError(f"max_corrupt is the share of examples that may be unreadable, in [0, 1], got {max_corrupt}")
    choose(on_corrupt, ("skip", "stop"), "on_corrupt policy")
    for name in control:
        choose(name, CONTROLS, "control")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be in [0, 2**32), got {seed}")
    if crop is not None and image_size is None:
        raise ValueError(f"crop={crop!r} needs image_size, the side of the window in pixels")
    if source.size == 0:
        raise ValueError(f"dataset {source.name!r} has no examples; check the path, the split and the file types")
