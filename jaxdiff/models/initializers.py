"""Initializers shared by several networks."""

from __future__ import annotations

from collections.abc import Callable

from flax import linen as nn
from jax import Array

Initializer = Callable[..., Array]  # (key, shape, dtype) -> array
xavier = nn.initializers.xavier_uniform()
zeros = nn.initializers.zeros
