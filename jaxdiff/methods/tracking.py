"""Power-function averages of several widths beside a method's own, from which any other is combined after training.

The averages of the student are in `state.averages` under `NAME.format(width)`; a width that the method's own average
has already is not kept twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax

from jaxdiff.methods import averaging
from jaxdiff.methods.method import Batch, Method, Metrics, TrainState, copy, data_of
from jaxdiff.trees import Params, Tree

NAME = "width_{:g}"


def names_of(widths: Sequence[float], own: float = 0.0) -> dict[float, str]:
    """The names of the averages by width; `own` is the width of the method's average, 0 if it is another kind."""
    for width in widths:
        averaging.exponent(width)  # raises its error
    if len(set(widths)) < len(widths):
        raise ValueError(f"ema.widths are different relative widths, got {tuple(widths)}")
    return {float(width): "ema" if width == own else NAME.format(width) for width in widths}


def tracked(method: Method, names: Mapping[float, str]) -> Method:
    """The method with these averages."""
    added = {name: averaging.power(width) for width, name in names.items() if name != "ema"}

    def init(key: jax.Array, batch: Batch, frozen: Tree = None) -> TrainState:
        state = method.init(key, batch, frozen)
        copies = {name: copy(state.params["student"]) for name in added}
        return state.replace(averages={**state.averages, **copies})  # type: ignore[attr-defined]

    def step(state: TrainState, batch: Batch, key: jax.Array) -> tuple[TrainState, Metrics]:
        new, metrics = method.step(state, batch, key)
        student, size = new.params["student"], len(data_of(batch))
        averages = {
            name: averaging.average(rate(new.step, size), state.averages[name], student) for name, rate in added.items()
        }
        return new.replace(averages={**new.averages, **averages}), metrics  # type: ignore[attr-defined]

    return method._replace(init=init, step=step)


def averages_of(state: TrainState, names: Mapping[float, str]) -> dict[float, Params]:
    """The averages by width."""
    return {width: state.averages[name] for width, name in names.items()}
