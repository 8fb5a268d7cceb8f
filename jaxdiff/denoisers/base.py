"""What every denoiser and everything that takes one share: the contract, and shapes of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

from jaxdiff.conditions import Cond
from jaxdiff.errors import check_real

Sigma = Float[Array, ""] | Float[Array, " b"] | float
Network = Callable[[Array, Array, Cond], Array]


@runtime_checkable
class Denoiser(Protocol):
    """The contract every wrapper below returns and every solver, transform and method takes.

    Args:
        x: noisy data [b ...], x0 + sigma eps.
        sigma: noise level, a scalar or one per example [b].
        cond: None or a dict of what the network is conditioned on, one row per example.

    Returns:
        The mean of x0 given x, of x's shape.
    """

    def __call__(self, x: Float[Array, "b ..."], sigma: Sigma, cond: Cond = None) -> Float[Array, "b ..."]: ...


def check_cond(cond: Cond) -> None:
    """A condition is None or a dict; the network checks its keys.

    Raises:
        TypeError: it is something else.

    Example:
        >>> check_cond({"label": jnp.array([3])})
    """
    if cond is not None and not isinstance(cond, Mapping):
        raise TypeError(f"cond must be None or a dict such as {{'label': labels}}, got {type(cond).__name__}")


def at_least_float32(x: ArrayLike) -> Array:
    """x as a floating array of 32 bits or more; half precision is for networks only.

    Example:
        >>> at_least_float32(jnp.ones(2, jnp.bfloat16)).dtype
        dtype('float32')
    """
    x = jnp.asarray(x)
    check_real("x", x.dtype)
    return x if x.dtype in (jnp.float32, jnp.float64) else x.astype(jnp.float32)


def per_example(value: ArrayLike, x: Array) -> Array:
    """A scalar, or one value per example, shaped to multiply x [b ...]; in x's dtype.

    Example:
        >>> per_example(jnp.ones(3), jnp.ones((3, 8, 8, 1))).shape
        (3, 1, 1, 1)
    """
    value = jnp.asarray(value, x.dtype)
    if value.ndim == 0:
        return value
    if value.shape != x.shape[:1]:
        raise ValueError(f"expected a scalar or one value per example, shape {x.shape[:1]}, got shape {value.shape}")
    return value.reshape(value.shape + (1,) * (x.ndim - 1))
