"""A residual MLP for points instead of images: the network of two-dimensional experiments.

c = E(noise label) + E(label);  x = [x, sin(2^k x), cos(2^k x)] W;  block: x += W2 silu(W1 x + c V)
out = x W, zero at the start
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float

from jaxdiff.models import layers
from jaxdiff.models.layers import Cond, Dtype


class MLP(nn.Module):
    """Points [b d] in, points out; `noise_label` is EDM's c_noise. cond takes `label` (num_classes = none given)
    and, with step_embed = "zero" or "reference", `step`. `frequencies` k = 0, 1, ... of each coordinate are for data
    with detail far smaller than their extent, which a network of coordinates alone is slow to learn.
    """

    channels: int = 2
    width: int = 128
    depth: int = 4
    num_classes: int = 0
    frequencies: int = 0
    step_embed: str = ""
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(
        self, x: Float[Array, "b d"], noise_label: Any, cond: Cond = None, *, deterministic: bool = True
    ) -> Float[Array, "b d"]:
        if x.ndim != 2 or x.shape[-1] != self.channels:
            raise ValueError(f"MLP with channels={self.channels} takes x of shape [b, {self.channels}], got {x.shape}")
        keys = ("label",) * bool(self.num_classes) + ("step",) * bool(self.step_embed)
        layers.check_keys("MLP", cond, keys)
        labels = layers.noise_labels(noise_label, x)
        c = layers.EmbedMLP(self.width, layers.xavier, name="time")(layers.sinusoid(100 * labels, 64))
        if self.num_classes:
            label = (cond or {}).get("label", jnp.full(x.shape[:1], self.num_classes))
            c = c + nn.Embed(self.num_classes + 1, self.width, name="label")(label)
        if self.step_embed:
            c = c + layers.StepEmbed(self.width, self.step_embed, name="step")(x, cond)
        waves = (x[:, :, None] * jnp.asarray(2.0 ** np.arange(self.frequencies), x.dtype)).reshape(len(x), -1)
        features = jnp.concatenate([x, jnp.sin(waves), jnp.cos(waves)], axis=-1)
        h = nn.Dense(self.width, dtype=self.dtype, name="in")(features)
        for i in range(self.depth):
            inner = jnp.concatenate([h, c.astype(h.dtype)], axis=-1)
            inner = nn.Dense(2 * self.width, dtype=self.dtype, name=f"block_{i}_in")(inner)
            h = h + nn.Dense(self.width, dtype=self.dtype, name=f"block_{i}_out")(nn.silu(inner))
        return nn.Dense(self.channels, kernel_init=layers.zeros, name="out")(nn.silu(h).astype(jnp.float32))
