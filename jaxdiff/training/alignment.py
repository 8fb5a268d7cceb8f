"""The feature network that diffusion.align aligns activations with: one of those that evaluation uses."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
from jax import Array
from ml_collections import ConfigDict

from jaxdiff import autoencoders
from jaxdiff.data import DataSpec
from jaxdiff.errors import pick
from jaxdiff.evaluation import FeatureNet, feature_net
from jaxdiff.evaluation.features import NETS
from jaxdiff.methods import Frozen
from jaxdiff.methods.method import Features
from jaxdiff.trees import Params


def features_of(config: ConfigDict, data: DataSpec) -> Features | None:
    """Features of patches where the network has them, else of whole images; files are read when they are needed.

    Latents are decoded by the autoencoder of the config, so that their features are those of images, too.
    """
    c = config.diffusion.align
    if not c.weight:
        return None
    pick(NETS, c.net, "diffusion.align.net")
    loaded = autoencoders.loader(config, data)
    _check(data, loaded is not None)

    @cache
    def net() -> FeatureNet:
        return feature_net(c.net, c.path or None, side=c.side or None)

    def params() -> Params:
        found = {"net": net().apply.args[0]}  # type: ignore[attr-defined]
        return found if loaded is None else {**found, "autoencoder": loaded()[1]}

    def apply(params: Params, x0: Array) -> Array:
        if loaded is not None:
            images: Any = loaded()[0].apply({"params": params["autoencoder"]}, x0, method="decode")
            x0 = images.clip(-1, 1)
        out = net().apply.func(params["net"], x0)  # type: ignore[attr-defined]
        return out.get("patches", out["features"][:, None, None])

    def shapes() -> Params:
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), params())

    return apply, Frozen(shapes, params)


def _check(data: DataSpec, decoded: bool) -> None:
    """Features are of images: those of the data, or decoded from latents."""
    images = data.latent is None and data.shape[-1] in (1, 3)
    if len(data.shape) == 3 and (images or decoded):
        return
    what = "latents" if data.latent is not None else "examples"
    raise ValueError(
        f"diffusion.align takes features of images, and {data.name} has {what} of shape {data.shape}; train on "
        "images, give the autoencoder of the latents (--config.autoencoder.kind and .path), or set "
        "diffusion.align.weight=0"
    )
