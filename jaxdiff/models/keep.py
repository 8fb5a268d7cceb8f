"""Values that are computed once.

XLA on CPU fuses a cheap value into each of its readers, which compute it again: a residual sum is then computed from
all its terms by every reduction of the next group norm. It drops `optimization_barrier` before it fuses, so a barrier
does not stop that; but it never computes a division twice. `keep` divides by what only the code generator knows to be
one and therefore leaves out.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def keep(x: Array) -> Array:
    """`x` itself, which CPU programs compute once and store; so is its gradient. Other platforms are left to fuse."""
    return _keep.bind(x)


def _divided(x: Array) -> Array:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    bits = 8 * x.dtype.itemsize
    integers = jnp.dtype(f"int{bits}")
    sign = lax.shift_right_arithmetic(lax.bitcast_convert_type(x, integers), jnp.asarray(bits - 1, integers))
    return x / jnp.where(sign > 0, jnp.asarray(2, x.dtype), jnp.asarray(1, x.dtype))  # the sign is 0 or -1


_keep = Primitive("keep")
_keep.def_impl(lambda x: x)
_keep.def_abstract_eval(lambda x: x)
ad.deflinear2(_keep, lambda cotangent, x: [_keep.bind(cotangent)])
batching.defvectorized(_keep)
mlir.register_lowering(_keep, mlir.lower_fun(lambda x: x, multiple_results=False))
mlir.register_lowering(_keep, mlir.lower_fun(_divided, multiple_results=False), platform="cpu")
