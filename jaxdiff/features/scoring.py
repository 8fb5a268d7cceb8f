"""Scores of many activations at one noise level: linear-probe accuracy and noise content."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import Sharding
from numpy.typing import ArrayLike

from jaxdiff.features.capture import Wrapper, noise
from jaxdiff.features.catalog import catalog
from jaxdiff.features.massive import check_massive_ratio, massive_channels, stream_of
from jaxdiff.features.probes import linear_probe
from jaxdiff.features.statistics import noise_leak, noise_to_signal
from jaxdiff.features.store import Rows
from jaxdiff.features.streaming import stream
from jaxdiff.trees import AnyArray, Params


class Subject(NamedTuple):
    """A network whose activations are scored. `null` is the null condition, {name: value of one image}."""

    model: nn.Module
    params: Params
    convention: Wrapper | None = None
    null: Mapping[str, ArrayLike] = {}
    sharding: Sharding | None = None  # of batches of images
    drop: Mapping[str, Sequence[int]] = {}  # of `extract`

    def stream(self, batches: Iterable[AnyArray], sigma: float, *, seed: int = 0, **options: Any) -> Iterator[Rows]:
        """`features.stream` of image batches under the null condition."""
        rows = ({"image": images, **_repeated(self.null, len(images))} for images in batches)
        own = {"convention": self.convention, "sharding": self.sharding, "drop": self.drop}
        options = {**own, "conditions": tuple(self.null), **options}
        return stream(self.model, self.params, rows, seed, sigma, **options)

    def collect(self, images: AnyArray, names: Sequence[str], sigma: float, batch: int = 64, **options: Any) -> Rows:
        """Features of images in memory, {name: [n h w c]}, or [n e h w c] with average=False."""
        batches = (images[i : i + batch] for i in range(0, len(images), batch))
        rows = list(self.stream(batches, sigma, select=tuple(names), **options))
        return {name: np.concatenate([part[name] for part in rows]) for name in rows[0]}


def without_massive(
    subject: Subject, images: AnyArray, names: Sequence[str], sigma: float, ratio: float, **options: Any
) -> Subject:
    """The subject with the massive channels of the blocks among `names` dropped, as found in these images."""
    check_massive_ratio(ratio)
    shape = (1, *np.shape(images)[1:])
    kinds = {name: tap.kind for name, tap in catalog(subject.model, shape, _repeated(subject.null, 1)).items()}
    streams = {name: stream_of(kinds, name) for name in names if name.endswith("/norm0")}
    if not streams:
        raise ValueError(f"massive channels are dropped from activations called norm0, none of {', '.join(names[:3])}")
    found = subject.collect(images, tuple(dict.fromkeys(streams.values())), sigma, **options)
    return subject._replace(drop={name: massive_channels(found[x], ratio) for name, x in streams.items()})


def _repeated(null: Mapping[str, ArrayLike], count: int) -> dict[str, np.ndarray]:
    return {name: np.broadcast_to(value, (count, *np.shape(value))) for name, value in null.items()}


def probe(
    subject: Subject,
    images: AnyArray,
    labels: AnyArray,
    names: Sequence[str],
    sigma: float,
    side: int = 2,
    **options: Any,
) -> dict[str, float]:
    """Accuracy on every second image of a linear probe fitted to the others, from features pooled to side x side."""
    found = subject.collect(images, names, sigma, side=side, **options)
    return {name: linear_probe((f[::2], labels[::2]), (f[1::2], labels[1::2]))[0] for name, f in found.items()}


def noise_in(
    subject: Subject,
    images: AnyArray,
    names: Sequence[str],
    sigma: float,
    draws: int = 4,
    seed: int = 0,
    **options: Any,
) -> dict[str, dict[str, float]]:
    """Noise-to-signal ratio and noise leak of each activation: {name: {"nsr": ..., "leak": ...}}, for `Filter`."""
    found = subject.collect(images, names, sigma, draws=draws, average=False, seed=seed, **options)
    index = jnp.arange(len(images))
    eps = np.stack([noise(seed, index, np.shape(images)[1:], draw) for draw in range(draws)], 1)
    return {name: {"nsr": noise_to_signal(f), "leak": noise_leak(f, eps)} for name, f in found.items()}
