"""A residual MLP for points instead of images, for two-dimensional experiments.

c = E(noise label) + E(label);  x = [x, sin(2^k x), cos(2^k x)] W;  block: x += W2 silu(W1 x + c V)
out = x W, zero-initialised
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.typing import Dtype
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxdiff.conditions import Cond, Signal
from jaxdiff.conventions import EDM
from jaxdiff.models import checks, conditioning, embeddings, initializers, taps


class MLP(nn.Module):
    """Points [b d] to points; `noise_label` is EDM's c_noise. cond takes `label` (num_classes: no class) and, with
    step_embed = "zero" or "reference", `step`. `frequencies` adds Fourier features of each coordinate, for data whose
    detail is much finer than their extent.
    """

    channels: int = 2
    width: int = 128
    depth: int = 4
    num_classes: int = 0
    frequencies: int = 0
    step_embed: str = ""
    dtype: Dtype = jnp.float32
    scalars: tuple[str, ...] = ()  # further scalar conditions, embedded as zero at initialisation, as ("tau",)

    published = EDM()

    @nn.nowrap
    def signals(self) -> dict[str, Signal]:
        """What it is conditioned on."""
        return conditioning.signals(self)

    @nn.compact
    def __call__(
        self, x: Float[Array, "b d"], noise_label: ArrayLike, cond: Cond = None, *, deterministic: bool = True
    ) -> Float[Array, "b d"]:
        if x.ndim != 2 or x.shape[-1] != self.channels:
            raise ValueError(f"MLP with channels={self.channels} takes x of shape [b, {self.channels}], got {x.shape}")
        checks.check_keys("MLP", cond, self.signals())
        labels = embeddings.noise_labels(noise_label, x)
        c = embeddings.EmbedMLP(self.width, initializers.xavier, name="time")(embeddings.sinusoid(100 * labels, 64))
        if self.num_classes:
            label = (cond or {}).get("label", jnp.full(x.shape[:1], self.num_classes))
            c = c + nn.Embed(self.num_classes + 1, self.width, name="label")(label)
        if self.step_embed:
            c = c + embeddings.StepEmbed(self.width, self.step_embed, name="step")(x, cond)
        c = conditioning.embed_scalars(self, c, x, cond)
        waves = (x[:, :, None] * jnp.asarray(2.0 ** np.arange(self.frequencies), x.dtype)).reshape(len(x), -1)
        features = jnp.concatenate([x, jnp.sin(waves), jnp.cos(waves)], axis=-1)
        h = nn.Dense(self.width, dtype=self.dtype, name="in")(features)
        for i in range(self.depth):
            inner = jnp.concatenate([h, c.astype(h.dtype)], axis=-1)
            inner = nn.Dense(2 * self.width, dtype=self.dtype, name=f"block_{i}_in")(inner)
            h = h + nn.Dense(self.width, dtype=self.dtype, name=f"block_{i}_out")(nn.silu(inner))
            taps.tap(self, f"block_{i}/out", h)
        return nn.Dense(self.channels, kernel_init=initializers.zeros, name="out")(nn.silu(h).astype(jnp.float32))
