"""Features of many images, batch by batch, with one compiled program."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from jax.sharding import Sharding

from jaxdiff.denoisers import Sigma
from jaxdiff.features.capture import extract
from jaxdiff.features.store import Rows
from jaxdiff.trees import AnyArray, Params


def stream(
    model: nn.Module,
    params: Params,
    batches: Iterable[AnyArray | Mapping[str, AnyArray]],
    seed: int,
    sigma: Sigma,
    *,
    conditions: tuple[str, ...] = (),
    sharding: Sharding | None = None,
    **options: Any,
) -> Iterator[Rows]:
    """`extract` over batches of images (arrays, or dicts with `image` and the keys in `conditions`), for `store.write`.

    Image i of the whole stream gets the noise of (seed, i). Smaller batches than the first are padded, so that
    one program suffices. `sharding` is that of each batch, padded to a multiple of the devices. `options` are those
    of `extract`; with average=False the draws are the second axis, after the images.
    """
    ways = 1 if sharding is None else sharding.num_devices
    first = 0 if options.get("average", True) else 1  # the image axis of `extract`'s results
    size = done = 0
    for batch in batches:
        rows = batch if isinstance(batch, Mapping) else {"image": batch}
        count = len(rows["image"])
        size = size or -(-count // ways) * ways
        if count > size:
            raise ValueError(f"a batch of {count} images after batches of {size}; only the last may differ")
        padded = {key: _padded(rows[key], size) for key in ("image", *conditions)}
        cond = jax.device_put(padded, sharding)
        x0 = cond.pop("image")
        features = extract(model, params, x0, seed, sigma, cond or None, index=np.arange(done, done + size), **options)
        yield {name: np.moveaxis(np.asarray(value), first, 0)[:count] for name, value in features.items()}
        done += count


def _padded(values: AnyArray, size: int) -> np.ndarray:
    values = np.asarray(values)
    return np.concatenate([values, np.repeat(values[-1:], size - len(values), axis=0)])
