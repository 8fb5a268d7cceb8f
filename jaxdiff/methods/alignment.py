"""Representation alignment (REPA, Yu et al. 2024): activations of a network follow those of a feature network.

    h [b n d]      an activation of the network for the noisy x, a tap (docs/features.md)
    y [b r c e]    features of the clean image by a frozen network, resampled to the grid of h
    loss           L_denoise + weight L_align,   L_align = -mean over examples and tokens of cos(P(h), y)

P is an MLP of three layers with SiLU, trained beside the network and not exported. Global features, [b e], are a grid
of one point: every token is aligned with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jaxtyping import Float

from jaxdiff.conditions import Cond
from jaxdiff.denoisers import Denoiser
from jaxdiff.errors import nearest
from jaxdiff.methods.method import Batch, Examples, Features, Parts, data_of
from jaxdiff.models import taps
from jaxdiff.trees import Params


@dataclass(frozen=True)
class AlignOptions:
    """Alignment of an activation with a feature network's."""

    weight: float = 0.0  # [0, inf) of the loss; 0: off, the paper's is 0.5
    tap: str = ""  # the activation, such as blocks_7/out; `jaxdiff features catalog` lists a network's
    net: str = "dinov2"  # feature network: dinov2, inception, efficientnet_lite0, digits
    path: str = ""  # its weights; needed to resume, too
    side: int = 0  # [0, 8192] images are resized to this side for it; 0: its own
    width: int = 2048  # [1, 2**20] of the hidden layers of the projection


class Projection(nn.Module):
    """P: d to `features`, through two hidden layers."""

    width: int
    features: int

    @nn.compact
    def __call__(self, h: Array) -> Array:
        for i in range(2):
            h = nn.silu(nn.Dense(self.width, name=f"hidden{i}")(h))
        return nn.Dense(self.features, name="out")(h)


def resample(y: Float[Array, "b r c e"], grid: tuple[int, int]) -> Float[Array, "b h w e"]:
    """Features on another grid, by linear interpolation; averaged where it is coarser."""
    return jax.image.resize(y, (len(y), *grid, y.shape[-1]), "linear")


def alignment_loss(projected: Float[Array, "b h w e"], y: Float[Array, "b h w e"]) -> Array:
    """-mean cos(projected, y) over examples and positions."""
    units = [a * jax.lax.rsqrt(jnp.square(a).sum(-1, keepdims=True) + 1e-12) for a in (projected, y)]
    return -(units[0] * units[1]).sum(-1).mean()


class Alignment:
    """The alignment of one network: what it adds to a step of diffusion training."""

    def __init__(self, options: AlignOptions, parts: Parts, features: Features) -> None:
        self.options, self.parts = options, parts
        self.features, self.frozen = features
        # blocks in a scan have no taps
        self.model = parts.model.clone(scan=False) if getattr(parts.model, "scan", False) else parts.model

    def observed(self, params: Params, seen: dict[str, Array], dropout: Array | None = None) -> Denoiser:
        """The network as a denoiser that notes the activation in `seen` as it is called."""
        weights = taps.unstacked(self.parts.model, self.parts.weights(params))
        rngs = None if dropout is None else {"dropout": dropout}

        def network(x: Array, label: Array, cond: Cond = None) -> Array:
            found: tuple[Any, Any] = self.model.apply(
                {"params": weights}, x, label, cond, deterministic=rngs is None, rngs=rngs, mutable=["intermediates"]
            )
            out, state = found
            every = taps.named(state.get("intermediates", {}))
            name = self.options.tap
            if name not in every:
                raise ValueError(
                    f"diffusion.align.tap={name!r} is not an activation of this {type(self.model).__name__}"
                    f"{nearest(name, every)}; `jaxdiff features catalog` lists them"
                )
            seen["h"] = self._on_grid(every[name], x.shape)
            return out

        return self.parts.convention(network)

    def _on_grid(self, h: Array, image: tuple[int, ...]) -> Array:
        grid = taps.grid_of(h.shape, image)
        if grid is None:
            raise ValueError(
                f"diffusion.align.tap={self.options.tap!r} has shape {h.shape}, which is not a grid of an image "
                f"{image[1]}x{image[2]}; choose another activation"
            )
        return h.reshape(len(h), *grid, -1).astype(jnp.float32)

    def targets(self, params: Params, x0: Array) -> Array:
        """The features y of clean images."""
        return jax.lax.stop_gradient(self.features(params, x0))

    def start(self, key: Array, student: Params, frozen: Params, batch: Batch) -> Params:
        """New parameters of P."""
        x0 = data_of(batch)
        seen: dict[str, Array] = {}
        cond = {**(self.parts.cond.example(len(x0)) or {}), **(self.parts.cond.of(batch) or {})}

        def shapes() -> tuple[Array, Array]:
            self.observed(student, seen)(x0, jnp.ones(len(x0)), cond or None)
            return seen["h"], self.targets(frozen, x0)

        h, y = jax.eval_shape(shapes)
        return Projection(self.options.width, y.shape[-1]).init(key, jnp.zeros((1, h.shape[-1])))["params"]

    def loss(self, projection: Params, h: Array, examples: Examples) -> Array:
        """L_align of the activation h and the features in `examples`."""
        y = resample(examples["features"], (h.shape[1], h.shape[2]))
        made: Any = Projection(self.options.width, y.shape[-1]).apply({"params": projection}, h)
        return alignment_loss(made, y)
