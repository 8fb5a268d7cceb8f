"""Distances between a student's state and its target: L1, L2, pseudo-Huber, LPIPS, and sums of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jax.typing import ArrayLike

from jaxdiff import weights
from jaxdiff.errors import choose
from jaxdiff.methods.method import Frozen, pseudo_huber
from jaxdiff.models.lpips import LPIPS
from jaxdiff.trees import Params


@dataclass(frozen=True)
class LpipsOptions:
    """The perceptual network of a loss that includes lpips."""

    weights: str = ""  # file of LPIPS weights
    net: str = "alex"  # alex, vgg
    pool: str = "max"  # max, avg
    resize: int = 0  # [0, 8192] resize images to this size first; 0: keep their size
    as_unit: bool = False  # treat [-1, 1] as [0, 1], as the authors' code does


def _l1(a: Array, b: Array) -> Array:
    return jnp.abs(a - b).reshape(a.shape[0], -1).sum(1)


def _l2(a: Array, b: Array) -> Array:
    return jnp.square(a - b).reshape(a.shape[0], -1).sum(1)


LOSSES: dict[str, Callable[[Array, Array], Array]] = {"l1": _l1, "l2": _l2, "pseudo_huber": pseudo_huber}
Perceptual = Callable[[Params, Array, Array], Array]  # (frozen parameters, a, b) -> distance per example


Criterion = Callable[[Mapping[str, Params], Array, Array, ArrayLike], Array]  # (frozen, a, b, last) -> loss


def make_loss(name: str, perceptual: Perceptual | None = None) -> Criterion:
    """(frozen, a, b, last) -> loss per example; `last` says whether a and b are ends of their trajectories.

    LPIPS is multiplied by the dimension. In sums such as "l1+lpips" it applies to the last step alone, whose states are
    images, as in the authors' code; "lpips" by itself applies to all steps.
    """
    names = name.split("+")
    for part in names:
        choose(part, (*LOSSES, "lpips"), "SFD loss (join several with +, as in l1+lpips)")
    if "lpips" in names and perceptual is None:
        raise ValueError(f"the loss {name!r} needs LPIPS weights; without them use one of {', '.join(LOSSES)}")

    def total(frozen: Mapping[str, Params], a: Array, b: Array, last: ArrayLike) -> Array:
        terms = [LOSSES[part](a, b) for part in names if part != "lpips"]
        if perceptual is not None and "lpips" in names:

            def seen() -> Array:
                return math.prod(a.shape[1:]) * perceptual(frozen["lpips"], a, b)

            terms.append(jax.lax.cond(last, seen, lambda: jnp.zeros(len(a), a.dtype)) if terms else seen())
        return jnp.stack(terms).sum(0)

    return total


def perceptual_of(
    loss: str, c: LpipsOptions, model: nn.Module, shape: tuple[int, ...]
) -> tuple[Perceptual | None, Frozen | None]:
    """The LPIPS network of a loss that includes it, and its weights."""
    if "lpips" not in loss.split("+"):
        return None, None
    net = LPIPS(net=c.net, pool=c.pool, resize=c.resize, dtype=getattr(model, "dtype", jnp.float32))

    def shapes() -> Params:
        example = jnp.zeros((1, *shape))
        return jax.eval_shape(lambda: net.init(jax.random.key(0), example, example)["params"])

    def load() -> Params:
        if not c.weights:
            raise ValueError(
                f"sfd.loss={loss!r} needs LPIPS weights: --config.sfd.lpips.weights=FILE "
                "(see docs/weights.md for where to get them), or use --config.sfd.loss=l1"
            )
        found, params = weights.load(c.weights, "lpips")
        if found.net != c.net:
            raise ValueError(f"{c.weights} contains the {found.net} network; set sfd.lpips.net={found.net!r}")
        return params

    def distance(params: Params, a: Array, b: Array) -> Any:
        if c.as_unit:
            a, b = 2 * a - 1, 2 * b - 1
        return net.apply({"params": params}, a, b)

    return distance, Frozen(shapes, load)
