"""Magnitude-preserving layers (Karras et al. 2024, arXiv 2312.02696, section 2.3 and appendix B).

Every layer maps inputs of unit magnitude (root mean square over channels) to outputs of unit magnitude, on average:

    normalize(x)     x / (|x| / sqrt(n) + 1e-4) over n elements
    layer            W x with the rows of W normalize(kernel) / sqrt(fan in), and a gain where one is learned
    silu             silu(x) / 0.596
    blend(a, b, t)   ((1 - t) a + t b) / sqrt((1 - t)^2 + t^2)
    concat(a, b, t)  [a (1 - t) / sqrt(n_a), b t / sqrt(n_b)] sqrt((n_a + n_b) / ((1 - t)^2 + t^2))
    fourier          sqrt(2) cos(2 pi (f x + phase)), f ~ N(0, 1), phase ~ U(0, 1)

The gradient of a normalized kernel is orthogonal to it, so updates would only lengthen it: training also replaces each
kernel by normalize(kernel) after every update (`force`), which keeps the size of its steps relative to it constant.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Dtype
from jaxtyping import Array, Float

from jaxdiff.models import convolution
from jaxdiff.trees import Params, Path, path_name

EPSILON = 1e-4
OUTPUT_AXES = {"qkv": 3}  # of the kernels of a layer with this name: roles, heads and channels; others have one


def normalize(x: Array, axes: tuple[int, ...]) -> Array:
    """x with unit root mean square over `axes`, computed in float32."""
    wide = x.astype(jnp.float32)
    magnitude = jnp.sqrt(jnp.square(wide).mean(axes, keepdims=True))
    return (wide / (magnitude + EPSILON)).astype(x.dtype)


def silu(x: Array) -> Array:
    return nn.silu(x) / 0.596


def blend(a: Array, b: Array, t: float) -> Array:
    """The sum of a and b in proportions 1 - t and t."""
    return ((1 - t) * a + t * b) / math.hypot(1 - t, t)


def concat(a: Array, b: Array, t: float) -> Array:
    """Channels of a and b, whose contributions have proportions 1 - t and t."""
    (n, m), total = (a.shape[-1], b.shape[-1]), math.hypot(1 - t, t)
    gain = math.sqrt(n + m) / total
    return jnp.concatenate([a * (gain * (1 - t) / math.sqrt(n)), b * (gain * t / math.sqrt(m))], axis=-1)


def unit_kernel(outputs: int) -> Callable[..., Array]:
    """The initializer of a kernel whose last `outputs` axes are its outputs."""

    def init(key: Array, shape: tuple[int, ...], dtype: Dtype = jnp.float32) -> Array:
        return normalize(jax.random.normal(key, shape, dtype), tuple(range(len(shape) - outputs)))

    return init


def force(params: Params) -> Params:
    """The parameters with every kernel replaced by its normalized form."""

    def normalized(path: Path, leaf: Array) -> Array:
        *_, layer, kind = ("", *path_name(path).split("/"))
        if kind != "kernel":
            return leaf
        return normalize(leaf, tuple(range(leaf.ndim - OUTPUT_AXES.get(layer, 1))))

    return jax.tree_util.tree_map_with_path(normalized, params)


class Linear(nn.Module):
    """A normalized matrix from the last axes of x to `features`."""

    features: tuple[int, ...]
    inputs: int = 1  # axes of x that it contracts
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Array, gain: Array | float = 1.0) -> Array:
        contracted = x.shape[x.ndim - self.inputs :]
        kernel = self.param("kernel", unit_kernel(len(self.features)), (*contracted, *self.features))
        scale = jnp.asarray(gain, jnp.float32) / math.sqrt(math.prod(contracted))
        weight = (normalize(kernel, tuple(range(self.inputs))) * scale).astype(self.dtype)
        return jnp.tensordot(x.astype(self.dtype), weight, self.inputs)


class Conv(nn.Module):
    """A convolution with a normalized kernel, without bias. `loop` as in `convolution.loop_conv`."""

    features: int
    size: int = 3
    loop: bool = False
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "b h w c"], gain: Array | float = 1.0) -> Float[Array, "b h w f"]:
        shape = (self.size, self.size, x.shape[-1], self.features)
        kernel = self.param("kernel", unit_kernel(1), shape)
        scale = jnp.asarray(gain, jnp.float32) / math.sqrt(math.prod(shape[:-1]))
        weight = (normalize(kernel, (0, 1, 2)) * scale).astype(self.dtype)
        convolve = convolution.loop_conv if self.loop else jax.lax.conv_general_dilated
        pad = self.size // 2
        return convolve(
            x.astype(self.dtype), weight, (1, 1), ((pad, pad),) * 2, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )


class Fourier(nn.Module):
    """Random features of a number; frequencies and phases are constant."""

    features: int

    @nn.compact
    def __call__(self, x: Float[Array, " b"]) -> Float[Array, "b f"]:
        circle = 2 * math.pi
        normal, uniform = nn.initializers.normal(circle), nn.initializers.uniform(circle)
        frequencies = self.param("frequencies", normal, (self.features,))
        phases = self.param("phases", uniform, (self.features,))
        angles = x[:, None] * jax.lax.stop_gradient(frequencies) + jax.lax.stop_gradient(phases)
        return math.sqrt(2) * jnp.cos(angles)
