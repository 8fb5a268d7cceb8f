"""Low-rank updates of a network's kernels (LoRA, Hu et al. 2022), for any network whose layers are Flax's own.

    W = W0 + scale a b        W0 [in, out] frozen, a [in, r] and b [r, out] trained

A kernel with more axes is such a matrix: a [*in, r], b [r, *out]; of scanned blocks, one for each layer. The factor on
the smaller side starts orthonormal, the other at zero, so W = W0 at first. With r = min(in, out) and gradient descent,
the first update is then scale^2 times that of W itself: for in <= out, b = -rate scale a' dW, and a a' = 1.

A network is given boxes (W0, a, b) instead of kernels. Flax opens a box where the kernel is used: in a scan and under
rematerialisation, W and its gradient exist for one layer at a time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from flax.core import meta
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array

from jaxdiff.trees import Params, Tree, mismatches

LAYERS = (nn.Dense, nn.DenseGeneral, nn.Conv)
SEP = "/"


@struct.dataclass
class Factors:
    """The update a b of one kernel."""

    a: Tree  # [*layers, *in, r]
    b: Tree  # [*layers, r, *out]


@struct.dataclass
class Adapters:
    """What is trained instead of a network's parameters."""

    low: Tree  # the parameters' tree with Factors, of those kernels alone that are updated
    full: Tree  # parameters that the base does not have, trained themselves
    scale: float = struct.field(pytree_node=False, default=1.0)
    base: str = struct.field(pytree_node=False, default="base")  # the name of the base among a state's frozen arrays


@struct.dataclass
class LowRank(meta.AxisMetadata):
    """A box that Flax opens to the kernel W0 + scale a b."""

    kernel: Tree
    factors: Factors
    scale: float = struct.field(pytree_node=False, default=1.0)

    def unbox(self) -> Array:
        return self.kernel + self.scale * product(self.factors, self.kernel.ndim).astype(self.kernel.dtype)

    def replace_boxed(self, val: Any) -> Any:
        return val

    def add_axis(self, index: int, params: dict[Any, Any]) -> LowRank:
        return self

    def remove_axis(self, index: int, params: dict[Any, Any]) -> LowRank:
        return self


def product(factors: Factors, ndim: int) -> Array:
    """a b, of each layer if the kernel of `ndim` axes is of several."""
    multiply: Callable[[Array, Array], Array] = lambda a, b: jnp.tensordot(a, b, 1, precision="highest")  # noqa: E731
    for _ in range(factors.a.ndim + factors.b.ndim - 2 - ndim):
        multiply = jax.vmap(multiply)
    return multiply(factors.a, factors.b)


def combined(base: Params, adapters: Adapters) -> Params:
    """The parameters, with boxes for the kernels that are updated."""
    low, full = _factors(adapters.low), flatten_dict(adapters.full, sep=SEP)
    found = {**flatten_dict(base, sep=SEP), **full}
    found |= {name: LowRank(found[name], factors, adapters.scale) for name, factors in low.items()}
    return unflatten_dict(found, sep=SEP)


@jax.jit
def merged(base: Params, adapters: Adapters) -> Params:
    """The parameters as a network without adapters has them."""
    return meta.unbox(combined(jax.device_put(base, jax.memory.Space.Device), adapters))


def _factors(low: Tree) -> dict[str, Factors]:
    return flatten_dict(low, is_leaf=lambda _, value: isinstance(value, Factors), sep=SEP)


# ------------------------------------------------------------------------------------------ start


class Axes(NamedTuple):
    """How a kernel [*layers, *in, *out] is a matrix: the number of axes of each."""

    inputs: int
    outputs: int


def kernels(init: Callable[[], Params]) -> tuple[Params, dict[str, Axes]]:
    """The shapes of what `init` returns, and the axes of the kernels of Dense, DenseGeneral and Conv layers."""
    found: dict[str, Axes] = {}

    def note(call: Callable[..., Any], args: tuple, options: dict[str, Any], context: Any) -> Any:
        out, module = call(*args, **options), context.module
        if isinstance(module, LAYERS) and context.method_name == "__call__":
            kernel: Array = module.get_variable("params", "kernel")  # in a scan, of one layer
            outputs = len(module.features) if isinstance(module.features, (tuple, list)) else 1
            found[SEP.join((*module.path, "kernel"))] = Axes(kernel.ndim - outputs, outputs)
        return out

    with nn.intercept_methods(note):
        shapes = jax.eval_shape(lambda: init())  # a new function: one that was traced before would not be traced again
    return shapes, found


class Base(NamedTuple):
    """A frozen base, and how adapters on it are made."""

    params: Params
    rank: int
    targets: str = ""  # regular expression on the paths of kernels
    scale: float = 1.0
    name: str = "base"

    def start(self, key: Array, init: Callable[[], Params]) -> Adapters:
        """Adapters of a network that `init` initialises: of kernels that match `targets`, and what the base lacks.

        The rank of an update is at most that of its kernel.
        """
        shapes, axes = kernels(init)
        wanted, held = flatten_dict(shapes, sep=SEP), flatten_dict(self.params, sep=SEP)
        wrong = mismatches(held, wanted, partial=True)
        if wrong:
            raise ValueError(f"low-rank updates need a base of the same network: {wrong}")
        chosen = [path for path in sorted(axes) if path in held and re.search(self.targets, path)]
        if not chosen:
            raise ValueError(
                f"lora.targets={self.targets!r} matches none of the network's {len(axes)} kernels, for example "
                f"{', '.join(sorted(axes)[:3])}; it is a regular expression on such paths, '' for all of them"
            )
        keys = dict(zip(chosen, jax.random.split(key, len(chosen)), strict=True))
        low = {path: _start(keys[path], wanted[path].shape, axes[path], self.rank) for path in chosen}
        fresh = {path: leaf for path, leaf in flatten_dict(init(), sep=SEP).items() if path not in held}
        return Adapters(unflatten_dict(low, sep=SEP), unflatten_dict(fresh, sep=SEP), self.scale, self.name)

    def weights(self, params: Params) -> Params:
        """Adapters with their base; other parameters as they are."""
        return combined(self.params, params) if isinstance(params, Adapters) else params


def _start(key: Array, shape: tuple[int, ...], axes: Axes, rank: int) -> Factors:
    layers = shape[: len(shape) - axes.inputs - axes.outputs]
    inner, outer = shape[len(layers) : len(shape) - axes.outputs], shape[len(shape) - axes.outputs :]
    rows, columns = math.prod(inner), math.prod(outer)
    smaller = min(rows, columns)
    rank = min(rank, smaller)
    basis = jnp.linalg.qr(jax.random.normal(key, (*layers, smaller, rank)))[0]
    if rows <= columns:
        return Factors(basis.reshape(*layers, *inner, rank), jnp.zeros((*layers, rank, *outer)))
    b = jnp.swapaxes(basis, -1, -2).reshape(*layers, rank, *outer)
    return Factors(jnp.zeros((*layers, *inner, rank)), b)
