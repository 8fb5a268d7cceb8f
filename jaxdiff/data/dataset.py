"""Datasets: a source with an order and a transform, and from them the batch of any step.

The batch of step s is a pure function of (seed, s). Positions s*B .. (s+1)*B of an endless order, reshuffled every
epoch, make the global batch; process p of P reads the p-th contiguous slice of it. Augmentation is a function of
(seed, position). So resuming needs the step number only, and a changed number of processes goes on in the same order.

    batch = {"image": float32 [b h w c] in [-1, 1], "label": int32 [b], "caption_id": int32 [b],
             "text": float32 [b l d], "text_mask": bool [b l], "pooled": float32 [b d],
             "control": {"original_size": float32 [b 2], "crop": [b 2], "flip": [b 1], "aspect": [b 1]}}

Keys a source has no values for are absent, `control` holds what was asked for.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

import numpy as np

from jaxdiff.data import transforms
from jaxdiff.data.captions import embed, with_text
from jaxdiff.data.examples import Fetch, Source, first_shape, gather, keeps_frame, per_example, reader_of
from jaxdiff.data.order import order
from jaxdiff.data.transforms import CONTROLS, Transform
from jaxdiff.errors import pick


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """Batches by step. `corrupt` counts, per file this process met, how often it was replaced.

    `encode(prompts)` embeds texts as the captions were, `judge(images, captions)` tells how well the two agree.
    `latent` holds the scale and shift of data that are latents.
    """

    name: str
    size: int
    image_shape: tuple[int, ...]
    seed: int
    fingerprint: str
    fetch: Fetch = dataclasses.field(repr=False)
    num_classes: int = 0
    class_names: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    captions: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    null: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    encode: Callable[[Sequence[str]], dict[str, Any]] | None = dataclasses.field(default=None, repr=False)
    judge: Callable[..., dict[str, float]] | None = dataclasses.field(default=None, repr=False)
    latent: Mapping[str, float] | None = None
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
    ) -> dict[str, Any]:
        """This process's slice of the global batch of `batch_size` examples at `step`."""
        start, stop = local_slice(step, batch_size, process_index, process_count)
        return self.take(start, stop, executor=executor)

    def take(self, start: int, stop: int, *, executor: Executor | None = None) -> dict[str, Any]:
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
            f"the nearest batch size that can is {near}"
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
    control: Sequence[str] = (),
    caption_text: Any = (),
    pooling: str = "",
    on_corrupt: str = "skip",
    log: Callable[[str], None] | None = None,
) -> Dataset:
    """A dataset over `source`; wrong options and an unusable first example fail here, not at step one.

    `image_size` with `crop` (center, global, local, mixed; default center) makes square windows, without it
    pictures must already agree in size. `control` names what to record (data.CONTROLS). `caption_text` makes
    conditions of captions: (length, width) by hashed words, or a folder with text.npy [captions + 1 l d]; with
    pooling="mean" the mean of its tokens is what is pooled of a text. `on_corrupt` is "skip" (replace by the next
    readable example of the epoch, count, name each file once through `log`) or "stop".
    """
    control = (control,) if isinstance(control, str) else tuple(control)
    _check(source, seed, image_size, crop, control, on_corrupt)
    if source.latent is not None and (image_size is not None or flip or channels is not None or control):
        raise ValueError(
            f"dataset {source.name!r} holds latents, which cannot be cut or mirrored: drop image_size, crop, flip, "
            "channels and control, and encode the mirror images too"
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
        reader = reader_of(source, on_corrupt == "skip", corrupt, log or logging.getLogger("jaxdiff.data").warning)
        shape = first_shape(source, reader, transform)
        fetch = per_example(source, reader, look_up, transform, shape, control, seed)
    if pooling and not caption_text:
        raise ValueError(f"pooling={pooling!r} pools the tokens of captions: set caption_text too")
    texts = embed(source.captions, caption_text, pooling) if caption_text else None
    none = texts.rows(np.array([len(source.captions)])) if texts else {}
    return Dataset(
        name=source.name,
        size=source.size,
        image_shape=shape,
        seed=seed,
        fingerprint=source.fingerprint,
        fetch=with_text(fetch, texts) if texts else fetch,
        num_classes=source.num_classes,
        class_names=source.class_names,
        captions=source.captions,
        null={**source.null, **{name: rows[0] for name, rows in none.items()}},
        encode=texts.encode if texts else None,
        judge=source.judge,
        latent=source.latent,
        in_memory=whole,
        corrupt=corrupt,
    )


def _check(
    source: Source, seed: int, image_size: int | None, crop: str | None, control: tuple[str, ...], on_corrupt: str
) -> None:
    pick({"skip": 0, "stop": 0}, on_corrupt, "on_corrupt policy")
    for name in control:
        pick(CONTROLS, name, "control")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be in [0, 2**32), got {seed}")
    if crop is not None and image_size is None:
        raise ValueError(f"crop={crop!r} needs image_size, the side of the window in pixels")
    if source.size == 0:
        raise ValueError(f"dataset {source.name!r} has no examples; check the path, the split and the file types")
