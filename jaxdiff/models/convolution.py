"""Convolutions chosen by platform and place, and resampling with separable filters.

conv             XLA's own; on CPU its inputs are kept, so that gradients read them instead of computing them again
loop_conv        gradients that are fast inside loops on CPU
upsampled_conv   conv(upsample(x)); on CPU as a convolution at the low resolution, 4/9 of the arithmetic:
                 output row 2i sees rows (i-1, i) with taps (k0, k1 + k2), row 2i+1 rows (i, i+1) with (k0 + k1, k2)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax.typing import PrecisionLike
from jaxtyping import Array, Float

from jaxdiff.models.keep import keep

Padding = Sequence[tuple[int, int]]  # before and after, per axis


def loop_conv(x: Array, kernel: Array, strides: Sequence[int], padding: str | Padding, **kwargs: Any) -> Array:
    """`lax.conv_general_dilated` whose gradients on CPU are convolutions of arrays in the order that is fast there.

    XLA on CPU transposes the arrays of a convolution's gradients to that order outside loops only, and is two orders of
    magnitude slower without. Here the transpositions are part of the program, so gradients are as fast inside loops as
    outside. Other platforms keep XLA's. Reverse mode only: `jax.jvp` raises. Convolutions that are
    strided, dilated or grouped, or padded by name, fall back to `lax.conv_general_dilated`.
    """
    dilated = any(step != 1 for name in ("lhs_dilation", "rhs_dilation") for step in kwargs.get(name) or (1,))
    grouped = kwargs.get("feature_group_count", 1) != 1 or kwargs.get("batch_group_count", 1) != 1
    if dilated or grouped or isinstance(padding, str) or any(stride != 1 for stride in strides):
        return jax.lax.conv_general_dilated(x, kernel, strides, padding, **kwargs)
    return _loop_conv(x, kernel, tuple((int(low), int(high)) for low, high in padding), kwargs.get("precision"))


def conv(x: Array, kernel: Array, strides: Sequence[int], padding: str | Padding, **kwargs: Any) -> Array:
    """`lax.conv_general_dilated` for use outside loops."""
    return keep(jax.lax.conv_general_dilated(keep(x), kernel, strides, padding, **kwargs))


def upsampled_conv(x: Array, kernel: Array, strides: Sequence[int], padding: Padding, **kwargs: Any) -> Array:
    """A 3x3 convolution of `upsample(x)` with padding 1."""
    if jnp.shape(kernel)[:2] != (3, 3) or any(tuple(pad) != (1, 1) for pad in padding):
        raise ValueError(f"upsampled_conv needs a 3x3 kernel and padding 1, got {jnp.shape(kernel)} and {padding}")
    return jax.lax.platform_dependent(
        x,
        kernel,
        cpu=partial(_phases, precision=kwargs.get("precision")),
        default=lambda x, kernel: jax.lax.conv_general_dilated(upsample(x), kernel, strides, padding, **kwargs),
    )


def _phases(x: Array, kernel: Array, precision: PrecisionLike) -> Array:
    """The four phases of the output as channels of one 2x2 convolution, a matrix product, interleaved."""
    b, h, w, _ = x.shape
    rows = jnp.stack([jnp.stack([kernel[0], kernel[1] + kernel[2]]), jnp.stack([kernel[0] + kernel[1], kernel[2]])])
    left = jnp.stack([rows[:, :, 0], rows[:, :, 1] + rows[:, :, 2]], axis=2)
    right = jnp.stack([rows[:, :, 0] + rows[:, :, 1], rows[:, :, 2]], axis=2)
    taps = rearrange(jnp.stack([left, right]), "q p i j c f -> (i j c) (p q f)")
    padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    windows = [padded[:, i : i + h + 1, j : j + w + 1] for i in range(2) for j in range(2)]
    columns = keep(jnp.concatenate(windows, axis=-1).reshape(b * (h + 1) * (w + 1), -1))
    made = keep(jnp.dot(columns, taps, precision=precision))
    made = rearrange(made, "(b h w) (p q f) -> p q b h w f", b=b, h=h + 1, p=2, q=2)
    parts = [[made[p, q, :, p : p + h, q : q + w] for q in range(2)] for p in range(2)]
    return rearrange(jnp.stack([jnp.stack(row) for row in parts]), "p q b h w f -> b (h p) (w q) f")


def _conv(x: Array, kernel: Array, padding: Padding, precision: PrecisionLike) -> Array:
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), padding, dimension_numbers=layout, precision=precision)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _loop_conv(x: Array, kernel: Array, padding: Padding, precision: PrecisionLike) -> Array:
    return _conv(x, kernel, padding, precision)


def _loop_conv_forward(
    x: Array, kernel: Array, padding: Padding, precision: PrecisionLike
) -> tuple[Array, tuple[Array, Array]]:
    return _conv(x, kernel, padding, precision), (x, kernel)


def _loop_conv_backward(
    padding: Padding, precision: PrecisionLike, inputs: tuple[Array, Array], g: Array
) -> tuple[Array, Array]:
    def ordered(x: Array, kernel: Array, g: Array) -> tuple[Array, Array]:
        room = [(size - 1 - low, size - 1 - high) for size, (low, high) in zip(kernel.shape, padding, strict=False)]
        flipped = jnp.flip(kernel, (0, 1)).swapaxes(2, 3)
        images, gradients = keep(x).transpose(3, 1, 2, 0), keep(g).transpose(1, 2, 0, 3)  # the batch as channels
        weight = _conv(images, gradients, padding, precision).transpose(1, 2, 0, 3)
        return _conv(g, flipped, room, precision), weight

    def native(x: Array, kernel: Array, g: Array) -> tuple[Array, Array]:
        return jax.vjp(lambda x, kernel: _conv(x, kernel, padding, precision), x, kernel)[1](g)

    return jax.lax.platform_dependent(*inputs, g, cpu=ordered, default=native)


_loop_conv.defvjp(_loop_conv_forward, _loop_conv_backward)


def downsample(
    x: Float[Array, "b h w c"], taps: tuple[int, ...] = (1, 1), padding: int | None = None
) -> Float[Array, "b k l c"]:
    """Halve the resolution with a separable filter; taps (1, 1) average 2x2 pixels."""
    if taps == (1, 1):  # not by strided slices: libtpu 0.0.51 aborts on some of them inside loops
        quads = rearrange(x, "b (h p) (w q) c -> p q b h w c", p=2, q=2)
        return (quads[0, 0] + quads[0, 1] + quads[1, 0] + quads[1, 1]) / 4
    pad = (len(taps) - 1) // 2 if padding is None else padding
    return _depthwise(x, taps, 1.0, strides=(2, 2), padding=((pad, pad),) * 2)


def upsample(x: Float[Array, "b h w c"], taps: tuple[int, ...] = (1, 1)) -> Float[Array, "b k l c"]:
    """Double the resolution with a separable filter; taps (1, 1) repeat pixels."""
    if taps == (1, 1):
        return x.repeat(2, axis=1).repeat(2, axis=2)
    pad = len(taps) - 1 - (len(taps) - 1) // 2
    return _depthwise(x, taps, 4.0, lhs_dilation=(2, 2), padding=((pad, pad),) * 2)


def _depthwise(x: Array, taps: tuple[int, ...], gain: float, strides: tuple[int, int] = (1, 1), **kwargs: Any) -> Array:
    outer = np.outer(taps, taps)
    kernel = jnp.asarray(gain * outer / outer.sum(), x.dtype)[:, :, None, None].repeat(x.shape[-1], axis=-1)
    return jax.lax.conv_general_dilated(
        x, kernel, strides, dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=x.shape[-1], **kwargs
    )
