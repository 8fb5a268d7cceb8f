"""The feature network that diffusion.align aligns activations with: one of those that evaluation uses."""

from __future__ import annotations

from functools import cache

import jax
from jax import Array
from ml_collections import ConfigDict

from jaxdiff.data import DataSpec
from jaxdiff.errors import pick
from jaxdiff.evaluation import FeatureNet, feature_net
from jaxdiff.evaluation.features import NETS
from jaxdiff.methods import Frozen
from jaxdiff.methods.method import Features
from jaxdiff.trees import Params


def features_of(config: ConfigDict, data: DataSpec) -> Features | None:
    """Features of patches where the network has them, else of whole images; its file is read when they are needed."""
    c = config.diffusion.align
    if not c.weight:
        return None
    pick(NETS, c.net, "diffusion.align.net")
    if data.latent is not None or len(data.shape) != 3 or data.shape[-1] not in (1, 3):
        what = "latents" if data.latent is not None else "examples"
        raise ValueError(
            f"diffusion.align takes features of images, and {data.name} has {what} of shape {data.shape}; train on "
            "images or set diffusion.align.weight=0"
        )

    @cache
    def net() -> FeatureNet:
        return feature_net(c.net, c.path or None, side=c.side or None)

    def params() -> Params:
        return net().apply.args[0]  # type: ignore[attr-defined]

    def apply(params: Params, images: Array) -> Array:
        out = net().apply.func(params, images)  # type: ignore[attr-defined]
        return out.get("patches", out["features"][:, None, None])

    def shapes() -> Params:
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), params())

    return apply, Frozen(shapes, params)
