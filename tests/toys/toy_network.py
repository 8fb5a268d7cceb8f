"""A network from outside the package: per-pixel layers over the image, a class and the noise label."""

import jax.numpy as jnp
from flax import linen as nn

from jaxdiff.conditions import label_signal
from jaxdiff.models import MODELS


class PixelMLP(nn.Module):
    """Images [b h w c] in and out; cond takes `label`."""

    channels: int = 1
    width: int = 16
    num_classes: int = 0

    @nn.nowrap
    def signals(self):
        return {"label": label_signal(self.num_classes)} if self.num_classes else {}

    @nn.compact
    def __call__(self, x, noise_label, cond=None, *, deterministic=True):
        label = (cond or {}).get("label", jnp.full(x.shape[:1], self.num_classes))
        e = nn.Embed(self.num_classes + 1, self.width, name="label")(label)
        e = e + nn.Dense(self.width, name="noise")(jnp.broadcast_to(noise_label, x.shape[:1])[:, None])
        h = nn.silu(nn.Dense(self.width, name="in")(x) + e[:, None, None])
        return nn.Dense(self.channels, kernel_init=nn.initializers.zeros, name="out")(h)


MODELS["pixel_mlp"] = PixelMLP
