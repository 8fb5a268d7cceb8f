"""Embeddings of noise labels, positions and step counts, in float32."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from jaxdiff.denoisers import Cond
from jaxdiff.errors import choose
from jaxdiff.models import initializers


def noise_labels(noise_label: ArrayLike, x: Array) -> Float[Array, " b"]:
    """The noise label as float32, one per example."""
    return jnp.broadcast_to(jnp.asarray(noise_label, jnp.float32).reshape(-1), x.shape[:1])


def sinusoid(value: Float[Array, " b"], width: int, endpoint: bool = False) -> Float[Array, "b {width}"]:
    """[cos(v f), sin(v f)] with f_k = 10000^(-k / (width/2 - endpoint)), in float32."""
    half = width // 2
    frequencies = 10000.0 ** (-np.arange(half) / (half - endpoint))
    angles = value[:, None] * jnp.asarray(frequencies, jnp.float32)
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


POSITIONS = ("interpolate", "extrapolate", "bicubic")


def sincos_positions(
    height: int, width: int, features: int, base: int = 0, kind: str = "interpolate"
) -> Float[np.ndarray, "{height} {width} {features}"]:
    """Fixed 2-D positions [height, width, features]: [e(column), e(row)].

    e(p) = [sin(p w), cos(p w)], w_k = 10000^(-4k/features). p counts tokens from 0; with `base`, the side of the
    training grid, a grid of another size uses p = i base / count (interpolate), p = i (extrapolate), or the training
    table resized to it (bicubic).
    """
    choose(kind, POSITIONS, "position resampling")
    if base and kind == "bicubic":
        table = sincos_positions(base, base, features)
        return np.einsum("ia,jb,abd->ijd", _cubic(height, base), _cubic(width, base), table).astype(np.float32)
    base = 0 if kind == "extrapolate" else base
    omega = 10000.0 ** (-np.arange(features // 4) / (features // 4))

    def encode(count: int) -> np.ndarray:
        angles = (np.arange(count) * (base / count if base else 1.0))[:, None] * omega
        return np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)

    columns = np.broadcast_to(encode(width)[None, :], (height, width, features // 2))
    rows = np.broadcast_to(encode(height)[:, None], (height, width, features // 2))
    return np.concatenate([columns, rows], axis=-1).astype(np.float32)


def position_table(side: int, features: int) -> Float[Array, "{side} {side} {features}"]:
    """`sincos_positions(side, side, features)` of its two axes, so that tracing it computes no table."""
    axis = jnp.asarray(sincos_positions(1, side, features)[0, :, : features // 2])
    shape = (side, side, features // 2)
    return jnp.concatenate([jnp.broadcast_to(axis, shape), jnp.broadcast_to(axis[:, None], shape)], axis=-1)


def _cubic(count: int, base: int) -> Float[np.ndarray, "{count} {base}"]:
    """The matrix that resizes `base` values to `count` by Keys' cubic kernel, with half-pixel centres."""
    centres = (np.arange(count) + 0.5) * base / count - 0.5
    d = np.abs(centres[:, None] - np.arange(base)) / max(1.0, base / count)
    near, far = (1.5 * d - 2.5) * d**2 + 1, ((2.5 - 0.5 * d) * d - 4) * d + 2
    weights = np.where(d < 1, near, np.where(d < 2, far, 0.0))
    return weights / weights.sum(axis=1, keepdims=True)


def rotary_angles(
    positions: Int[np.ndarray, "n axes"], widths: Sequence[int]
) -> tuple[Float[Array, "n d"], Float[Array, "n d"]]:
    """Cosines and sines of rotary positions, d the sum of `widths`: axis i rotates pairs of widths[i] channels.

    The pair k of an axis turns by p 10000^(-2k/width), and both of its channels have that angle.
    """
    angles = [
        np.outer(positions[:, i], 10000.0 ** (-np.arange(0, width, 2) / width)).repeat(2, axis=1)
        for i, width in enumerate(widths)
    ]
    joined = np.concatenate(angles, axis=1)
    return jnp.asarray(np.cos(joined), jnp.float32), jnp.asarray(np.sin(joined), jnp.float32)


def rotate(
    x: Float[Array, "b n h d"], angles: tuple[Float[Array, "n d"], Float[Array, "n d"]]
) -> Float[Array, "b n h d"]:
    """Each pair of neighbouring channels (a, b) as (a cos - b sin, b cos + a sin), in float32, returned in x's dtype.

    Neighbours are exchanged by shifts, not by an axis of length 2, which TPUs would pad.
    """
    cos, sin = (part[:, None] for part in angles)
    wide = x.astype(jnp.float32)
    even = np.arange(x.shape[-1]) % 2 == 0
    turned = jnp.where(even, -jnp.roll(wide, -1, axis=-1), jnp.roll(wide, 1, axis=-1))
    return (wide * cos + turned * sin).astype(x.dtype)


class EmbedMLP(nn.Module):
    """Dense, SiLU, Dense in float32, for timesteps, pooled text and other vectors that enter the modulation."""

    features: int
    kernel_init: initializers.Initializer = nn.initializers.normal(0.02)

    @nn.compact
    def __call__(self, x: Float[Array, "b d"]) -> Float[Array, "b e"]:
        x = nn.Dense(self.features, kernel_init=self.kernel_init, name="in")(x)
        return nn.Dense(self.features, kernel_init=self.kernel_init, name="out")(nn.silu(x))


STEP_INITS = ("", "zero", "reference")


class StepEmbed(nn.Module):
    """The embedding of cond[key], a few-step student's number of timestamps or any other scalar, in float32.

    start="zero" zero-initialises the last Dense, so the network starts as if unconditioned; "reference" does not.
    """

    features: int
    start: str = "zero"
    key: str = "step"

    @nn.compact
    def __call__(self, x: Array, cond: Cond) -> Float[Array, "b e"]:
        value = step_value(x, cond, self.start) if self.key == "step" else scalar_value(x, cond, self.key)
        e = sinusoid(value, 256)
        e = nn.silu(nn.Dense(self.features, kernel_init=initializers.xavier, name="in")(e))
        init = initializers.zeros if self.start == "zero" else initializers.xavier
        return nn.Dense(self.features, kernel_init=init, name="out")(e)


def step_value(x: Array, cond: Cond, init: str) -> Float[Array, " b"]:
    """cond["step"] as float32, one per example, for a network whose step_embed is `init`."""
    if init not in STEP_INITS:
        raise ValueError(f"step_embed must be one of {', '.join(map(repr, STEP_INITS))}, got {init!r}")
    if "step" not in (cond or {}):
        raise ValueError(f"a network with step_embed={init!r} needs cond['step'], the number of timestamps")
    return noise_labels(cond["step"], x)  # type: ignore[index]


def scalar_value(x: Array, cond: Cond, key: str) -> Float[Array, " b"]:
    """cond[key] as float32, one per example, for a network whose `scalars` name it."""
    if key not in (cond or {}):
        raise ValueError(f"a network with {key!r} in its scalars needs cond[{key!r}], one number per example")
    return noise_labels(cond[key], x)  # type: ignore[index]
