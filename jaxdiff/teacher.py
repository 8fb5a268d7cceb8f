"""A teacher of your own, as `load(config)` in a Python file returns it: docs/own_teacher.md.

--config.teacher.kind=python --config.teacher.path=my_teacher.py:load
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import Array
from jax.typing import ArrayLike

from jaxdiff.conventions import Convention
from jaxdiff.denoisers import Cond, Denoiser, Sigma
from jaxdiff.models import bind
from jaxdiff.models.plain import Plain, adapted
from jaxdiff.trees import Params


@dataclass(frozen=True, eq=False)
class Teacher:
    """A denoiser as a function of its parameters, and what a student must know of its data.

    Give `network` with its `convention`, or `denoiser`, or both. A student of the same `network` starts from `params`.
    """

    params: Params  # a pytree of arrays; {} if the denoiser needs none
    shape: tuple[int, ...]  # of one image, (height, width, channels), or of a point
    num_classes: int = 0  # cond["label"] is 0 .. num_classes - 1, and num_classes for no class
    network: nn.Module | Plain | None = None  # called with (x, noise_label, cond)
    convention: Convention | None = None  # how the network is scaled, and what it predicts
    denoiser: Callable[[Params], Denoiser] | None = None  # params -> D(x, sigma, cond)
    differentiable: bool = True  # False: gradients cannot pass through it, as through `on_host`

    def __post_init__(self) -> None:
        if self.denoiser is None and (self.network is None or self.convention is None):
            raise ValueError(
                "Teacher needs denoiser=, a function params -> D(x, sigma, cond), or network= with its convention=, "
                "such as conventions.EDM(0.5), DDPM('linear', 'eps') or Flow(1.0)"
            )

    def denoise(self, params: Params) -> Denoiser:
        """The denoiser with these parameters."""
        if self.denoiser is not None:
            return self.denoiser(params)
        assert self.convention is not None
        return self.convention(bind(self.model, params))

    @property
    def model(self) -> nn.Module:
        """The network as a model of the package."""
        assert self.network is not None
        return adapted(self.network, self.shape[-1], self.num_classes)


def on_host(function: Callable[..., Any]) -> Callable[[Params], Denoiser]:
    """The denoiser of a function of NumPy arrays, `function(x, sigma [b], cond) -> x0`, such as a PyTorch network.

    It is called from inside compiled programs, and no gradient passes through it: Teacher(..., differentiable=False).
    """

    def call(x: ArrayLike, sigma: ArrayLike, cond: dict[str, ArrayLike]) -> np.ndarray:
        arrays = {name: np.asarray(value) for name, value in cond.items()}
        return np.asarray(function(np.asarray(x), np.asarray(sigma), arrays or None), np.float32)

    def denoise(x: Array, sigma: Sigma, cond: Cond = None) -> Array:
        levels = jnp.broadcast_to(jnp.asarray(sigma, jnp.float32), x.shape[:1])
        out = jax.ShapeDtypeStruct(x.shape, jnp.float32)
        inputs = jax.lax.stop_gradient((x, levels, dict(cond or {})))
        return jax.pure_callback(call, out, *inputs, vmap_method="sequential").astype(x.dtype)

    return lambda params: denoise
