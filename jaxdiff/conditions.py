"""What networks are conditioned on: the signals a dataset provides and a network takes, matched by name.

    cond = {"label": int32 [b], "text": float32 [b l d], "text_mask": bool [b l], "pooled": float32 [b d],
            "original_size": float32 [b 2], "crop": [b 2], "flip": [b 1], "aspect": [b 1], ...}

A dataset declares the signals it has, a network those it takes (`model.signals()`); `Conditions.match` intersects the
two and is the only place that rejects a mismatch. Signals of one group are dropped and guided together: "semantic"
(class, text), "control" (metadata such as size and crop), "method" (set by the training algorithm, never by data).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

Cond = Mapping[str, Any] | None  # arrays with one row per example
SEMANTIC, CONTROL, METHOD = "semantic", "control", "method"
CONTROLS = {"original_size": 2, "crop": 2, "flip": 1, "aspect": 1, "resized_size": 2}  # and the width of each
STREAMS = {SEMANTIC: 0, CONTROL: 6}  # folded into the dropout key of each group; other groups hash their name


@dataclass(frozen=True, eq=False)
class Signal:
    """One conditioning input of an example.

    shape     per example; None is any length
    null      the value that means "not given"; None: it is never dropped
    group     signals of a group are dropped and guided together
    required  for a network's signal: whether data without it are rejected
    default   for a network's signal: the value used for samples unless one is given; None: zeros for control
    """

    shape: tuple[int | None, ...] = ()
    dtype: str = "float32"
    null: Any = None
    group: str = SEMANTIC
    required: bool = True
    default: Any = None

    def batch_shape(self, n: int) -> tuple[int, ...]:
        """The shape for n examples; a variable length becomes 1."""
        return (n, *(1 if side is None else side for side in self.shape))


def label_signal(num_classes: int) -> Signal:
    """A class label in [0, num_classes); num_classes itself means no class."""
    return Signal((), "int32", num_classes)


class Conditions(dict[str, Signal]):
    """The signals a network is conditioned on, by name."""

    @classmethod
    def match(cls, model: object, available: Mapping[str, Signal], data: str) -> Conditions:
        """The signals that `model` takes, with the shapes and null values of the dataset named `data`."""
        taken, found = signals_of(model), cls()
        name_of_model = type(model).__name__
        for name, wanted in taken.items():
            given = available.get(name)
            if given is not None:
                found[name] = _joined(name, wanted, given, name_of_model, data)
            elif not wanted.required:
                if None not in wanted.shape:
                    found[name] = wanted
            else:
                raise ValueError(_missing(name, wanted, name_of_model, available, data))
        return found

    @classmethod
    def of_model(cls, model: object) -> Conditions:
        """The signals a network declares, limited to those of fixed shape."""
        return cls({name: signal for name, signal in signals_of(model).items() if None not in signal.shape})

    def of(self, batch: Mapping[str, Any]) -> dict[str, Any] | None:
        """The conditioning of a batch: its entries that are signals."""
        return {name: batch[name] for name in self if name in batch} or None

    def example(self, n: int) -> dict[str, Any] | None:
        """Zeros for every signal, to infer shapes and initialise."""
        return {name: jnp.zeros(signal.batch_shape(n), signal.dtype) for name, signal in self.items()} or None

    def null(self, *groups: str) -> dict[str, Any] | None:
        """The null values of the signals in these groups."""
        droppable = {name: signal.null for name, signal in self.items() if signal.group in groups}
        return {name: value for name, value in droppable.items() if value is not None} or None

    def has(self, group: str) -> bool:
        """Whether any signal in the group can be dropped."""
        return self.null(group) is not None

    @property
    def num_classes(self) -> int:
        """Number of classes; 0 without a label."""
        return int(self["label"].null) if "label" in self else 0

    def dropout(self, key: Array, cond: Mapping[str, Any], rates: Mapping[str, float]) -> dict[str, Any]:
        """`cond` with the signals of each group replaced by their null values, per example, at the group's rate."""
        out = dict(cond)
        for group, rate in rates.items():
            null = {name: value for name, value in (self.null(group) or {}).items() if name in cond}
            if not rate or not null:
                continue
            stream = STREAMS.get(group, zlib.crc32(group.encode()) & 0x7FFFFFFF)
            examples = jnp.shape(next(iter(cond.values())))[:1]
            gone = jax.random.bernoulli(jax.random.fold_in(key, stream), rate, examples)
            for name, empty in null.items():
                value = jnp.asarray(cond[name])
                mask = gone.reshape(-1, *(1 for _ in value.shape[1:]))
                out[name] = jnp.where(mask, jnp.asarray(empty, value.dtype), value)
        return out


def signals_of(model: object) -> Mapping[str, Signal]:
    """What a network is conditioned on: its `signals()`, or nothing if it declares none."""
    declare = getattr(model, "signals", None)
    return {} if declare is None else declare()


def _joined(name: str, wanted: Signal, given: Signal, model: str, data: str) -> Signal:
    """The signal as the data provide it, with the network's null value where the data define none."""
    fits = len(wanted.shape) == len(given.shape)
    fits = fits and all(w in (None, g) for w, g in zip(wanted.shape, given.shape, strict=True))
    if not fits:
        raise ValueError(
            f"{model} takes {name!r} of shape {_shape(wanted)}, {data} has shape {_shape(given)}; set "
            f"the matching width in model.fields, or use data embedded at that width"
        )
    if name == "label" and given.null is not None and int(given.null) > int(wanted.null):
        raise ValueError(
            f"{model} expects num_classes={wanted.null}, {data} has {given.null} classes; leave "
            "model.fields.num_classes out to follow the data"
        )
    null = wanted.null if name == "label" or given.null is None else given.null
    return replace(wanted, shape=given.shape, dtype=given.dtype, null=null)


def _missing(name: str, wanted: Signal, model: str, available: Mapping[str, Signal], data: str) -> str:
    if name == "label":
        return (
            f"{model} expects num_classes={wanted.null}, {data} is unlabelled; set model.fields.num_classes=0, or "
            "data.options.num_classes for data.source='blank'"
        )
    hint = "choose another data source, or a network that does not need it"
    if wanted.group == CONTROL:
        hint = f"record it with data.options.control, or leave {name!r} out of model.fields.control.keys"
    if name in ("text", "pooled"):
        hint = "embed captions with data.options.caption_text, or use a class-conditional network"
    has = ", ".join(available) or "no signals"
    return f"{model} is conditioned on {name!r}, which {data} does not have ({has}); {hint}"


def _shape(signal: Signal) -> str:
    return f"[b, {', '.join('any' if side is None else str(side) for side in signal.shape)}]"
