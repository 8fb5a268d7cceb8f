"""LoRA: any method trained on low-rank updates of a frozen base (`models/low_rank.py` has the equations).

    params       {student, score, ...}: adapters; optimizer states and averages are of adapters, too
    frozen       the base: the teacher, or the parameters of train.init_from
    exported     base and average, merged: samples, evaluations and exports are of an ordinary network

A method is a function of its parts, so it is built anew around the base that a state holds; it needs no change. The
average of adapters averages a and b, not their product.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from jax import Array

from jaxdiff.methods.method import Batch, Frozen, Method, Metrics, Parts, TrainState
from jaxdiff.models import low_rank
from jaxdiff.trees import Params, Tree


@dataclasses.dataclass(frozen=True)
class Options:
    """The section `lora` of a config."""

    rank: int = 0  # [0, 65536] of the update of each kernel; 0: off, all parameters are trained
    alpha: float = 0.0  # [0, inf) the update is alpha / rank times a b; 0: times 1
    targets: str = ""  # regular expression on the paths of kernels that are updated; "": all of them

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ValueError(f"lora.rank must be 0 (off) or positive, got {self.rank}")
        try:
            re.compile(self.targets)
        except re.error as error:
            raise ValueError(f"lora.targets={self.targets!r} is not a regular expression: {error}") from None

    @property
    def scale(self) -> float:
        return self.alpha / self.rank if self.alpha else 1.0


def adapted(build: Callable[[Parts], Method], parts: Parts, options: Options, base: Frozen | None = None) -> Method:
    """The method on low-rank updates of `base`, or of the teacher if it is None."""
    _check(parts, base)
    name = "teacher" if base is None else "base"

    def on(held: Params) -> Method:
        lora = low_rank.Base(held, options.rank, options.targets, options.scale, name)
        return build(dataclasses.replace(parts, lora=lora))

    plain = build(parts)

    def init(key: Array, batch: Batch, frozen: Mapping[str, Tree]) -> TrainState:
        others = {other: value for other, value in frozen.items() if other != "base"}
        begun = on(frozen[name]).init(key, batch, others)
        return dataclasses.replace(begun, frozen={**begun.frozen, name: frozen[name]})

    def step(state: TrainState, batch: Batch, key: Array) -> tuple[TrainState, Metrics]:
        return on(state.frozen[name]).step(state, batch, key)

    def correct(state: TrainState, *arguments: Any, **how: Any) -> tuple[Array, Array]:
        method = on(state.frozen[name])
        assert method.correct is not None
        return method.correct(state, *arguments, **how)

    frozen = dict(plain.frozen) if base is None else {**plain.frozen, "base": base}
    return plain._replace(init=init, step=step, frozen=frozen, correct=correct if plain.correct else None)


def _check(parts: Parts, base: Frozen | None) -> None:
    if base is None and (parts.teacher is None or not parts.teacher.own):
        raise ValueError(
            "lora.rank > 0 updates a trained network: set train.init_from and train.init_kind, or distil a teacher of "
            "kind run or of public weights; for all parameters set lora.rank=0"
        )
    if getattr(parts.model, "force", None) is not None:
        raise ValueError(
            f"{type(parts.model).__name__} normalizes its kernels, which a low-rank update of them would not keep; set "
            "lora.rank=0"
        )
