"""Features of diffusion transformers without their massive channels (DiTF, Gan et al. 2025).

    x           the residual stream that enters a block [b n c]
    massive     channels with mean |x_c| > ratio * median over channels of mean |x_c|
    norm0       LN(x) (1 + scale) + shift, the activation that the block's adaLN modulates by itself
    drop        LN(x with its massive channels set to 0) (1 + scale) + shift

A few fixed channels of x are so large in all tokens that cosines of x see little else, and that LN makes the others
small; which they are depends on the network and hardly on the image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxdiff.models.transformer import modulate
from jaxdiff.trees import AnyArray

STREAM = ("embedded", "block_out", "skip")  # kinds of activations that are the input of the next block


def massive_channels(x: Float[AnyArray, "... c"], ratio: float = 10.0) -> tuple[int, ...]:
    """The channels whose mean magnitude exceeds `ratio` times the median over channels."""
    check_massive_ratio(ratio)
    size = np.abs(np.asarray(x, np.float64)).reshape(-1, np.shape(x)[-1]).mean(0)
    return tuple(int(channel) for channel in np.flatnonzero(size > ratio * np.median(size)))


def check_massive_ratio(ratio: float) -> None:
    """Half of the channels exceed the median by 1."""
    if not ratio > 1:
        raise ValueError(f"massive channels exceed the median by a ratio above 1, got {ratio=}")


def stream_of(kinds: Mapping[str, str], name: str) -> str:
    """The activation that a block's `norm0` normalises. `kinds` are those of all activations, in order of execution."""
    names = list(kinds)
    if kinds.get(name) != "norm" or not name.endswith("/norm0") or modulation_of(name) not in kinds:
        with_modulation = [other for other in names if other.endswith("/norm0") and modulation_of(other) in kinds]
        allowed = f"{', '.join(with_modulation[:3])} ..." if with_modulation else "none of this network"
        raise ValueError(f"massive channels are dropped from the norm0 of blocks with adaLN ({allowed}), not {name!r}")
    before = names[: names.index(name)]
    return next(other for other in reversed(before) if kinds[other] in STREAM)


def modulation_of(name: str) -> str:
    """The shift and scale [b 2 c] of a block's `norm0`."""
    return f"{name.removesuffix('/norm0')}/modulation"


def modulated(
    x: Float[Array, "b n c"], modulation: Float[Array, "b 2 c"], drop: Sequence[int] = ()
) -> Float[Array, "b n c"]:
    """LN(x) (1 + scale) + shift with the channels `drop` of x set to 0 first, for modulation = (shift, scale)."""
    kept = x.at[..., np.asarray(drop, int)].set(0)
    return modulate(kept, modulation[:, 0], modulation[:, 1], jnp.float32)
