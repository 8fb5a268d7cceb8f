"""A conditioning signal from outside the package: the mean brightness of an image, in a source and in a network."""

import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxdiff.conditions import Signal
from jaxdiff.data import SOURCES
from jaxdiff.data.memory import digits
from jaxdiff.models import MODELS


def bright_digits():
    """The digits with their brightness in [-1, 1]."""
    source = digits()
    brightness = source.arrays["image"].mean((1, 2, 3))[:, None].astype(np.float32)
    columns = {**source.arrays, "brightness": brightness}
    read = lambda i: {name: column[i] for name, column in columns.items()}  # noqa: E731
    signals = {"brightness": Signal((1,))}
    return source._replace(name="bright_digits", arrays=columns, read=read, signals=signals)


class BrightnessNet(nn.Module):
    """A per-pixel network conditioned on brightness; samples are of medium brightness unless something else is said."""

    channels: int = 1
    width: int = 16

    @nn.nowrap
    def signals(self):
        return {"brightness": Signal((1,), null=0.0, default=(-0.4,))}

    @nn.compact
    def __call__(self, x, noise_label, cond, *, deterministic=True):
        e = nn.Dense(self.width, name="brightness")(cond["brightness"])
        e = e + nn.Dense(self.width, name="noise")(jnp.broadcast_to(noise_label, x.shape[:1])[:, None])
        h = nn.silu(nn.Dense(self.width, name="in")(x) + e[:, None, None])
        return nn.Dense(self.channels, name="out")(h)


SOURCES["bright_digits"] = bright_digits
MODELS["brightness_net"] = BrightnessNet
