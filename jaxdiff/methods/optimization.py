"""The optimizers that methods are given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import optax
from jax import Array
from jax.typing import ArrayLike

from jaxdiff.trees import Params


@dataclass(frozen=True)
class Optimizers:
    """Optimizers of a method. `scheduled` follows the learning-rate schedule, counting its own updates.

    Methods with several updates per iteration use `constant(learning_rate)` (None: the configured rate) and multiply
    its updates by `factor(iteration)`.
    """

    scheduled: optax.GradientTransformation
    constant: Callable[[float | None], optax.GradientTransformation]
    factor: Callable[[Array], ArrayLike] = lambda iteration: 1.0


def optimizers(plain: optax.GradientTransformation, score: optax.GradientTransformation | None = None) -> Optimizers:
    """One optimizer for everything, or `score` for networks with their own learning rate."""

    def constant(rate: float | None) -> optax.GradientTransformation:
        return plain if rate is None or score is None else score

    return Optimizers(plain, constant)


class Forced(optax.GradientTransformation):
    """An optimizer after whose updates the parameters are replaced by `force(params)`."""

    force: Callable[[Params], Params]


def forced(plain: Optimizers, force: Callable[[Params], Params]) -> Optimizers:
    """The optimizers, for a network whose weights are normalized after every update."""

    def wrap(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
        made = Forced(*optimizer)
        made.force = force
        return made

    return replace(plain, scheduled=wrap(plain.scheduled), constant=lambda rate: wrap(plain.constant(rate)))


def unforced(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same updates, for parameters that are not the network's, such as a head's."""
    return optax.GradientTransformation(*optimizer)
