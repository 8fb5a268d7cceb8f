"""Networks in Flax Linen, NHWC, all called as `model(x, noise_label, cond=None, *, deterministic=True)`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flax import linen as nn
from jax import Array

from jaxdiff.denoisers import Cond, Network
from jaxdiff.errors import pick
from jaxdiff.models import clip, conditioning, dit, latent_unet, mdt, mmdit, pixart, t5, unet, vae
from jaxdiff.models.clip import CLIPText, CLIPVision
from jaxdiff.models.dit import DiT
from jaxdiff.models.latent_unet import LatentUNet
from jaxdiff.models.mdt import MDT
from jaxdiff.models.mlp import MLP
from jaxdiff.models.mmdit import MMDiT
from jaxdiff.models.pixart import PixArt
from jaxdiff.models.t5 import T5Encoder
from jaxdiff.models.taesd import TAESD
from jaxdiff.models.unet import UNet
from jaxdiff.models.vae import AutoencoderKL

MODELS: dict[str, type[nn.Module]] = {
    "unet": UNet,
    "dit": DiT,
    "mmdit": MMDiT,
    "mlp": MLP,
    "latent_unet": LatentUNet,
    "mdt": MDT,
    "pixart": PixArt,
}

__all__ = [
    "MDT",
    "MLP",
    "MODELS",
    "TAESD",
    "AutoencoderKL",
    "CLIPText",
    "CLIPVision",
    "DiT",
    "LatentUNet",
    "MMDiT",
    "PixArt",
    "T5Encoder",
    "UNet",
    "build",
    "check_fields",
    "clip",
    "conditioning",
    "dit",
    "latent_unet",
    "mdt",
    "mmdit",
    "network",
    "pixart",
    "t5",
    "unet",
    "vae",
]


def build(name: str, **fields: Any) -> nn.Module:
    """A model by its name in MODELS; unknown names and fields are refused. `control` may be given as a dict."""
    model = pick(MODELS, name, "model")
    check_fields(model, fields)
    if isinstance(fields.get("control"), Mapping):
        fields["control"] = conditioning.make_control(fields["control"])
    return model(**fields)


def check_fields(model: type[nn.Module], fields: Mapping[str, Any]) -> None:
    """Every name in `fields` is a field of the model."""
    allowed = dict.fromkeys(field for field in model.__dataclass_fields__ if field not in ("parent", "name"))
    for field in fields:
        pick(allowed, field, f"{model.__name__} field")


def network(
    model: nn.Module, params: Mapping[str, Any], dropout: Array | None = None, mask: Array | None = None
) -> Network:
    """The function `(x, noise_label, cond) -> array` that denoisers wrap.

    A `dropout` key switches dropout on; a `mask` key, for a model that knows how (MDT), hides part of the tokens.
    """
    rngs = {name: key for name, key in (("dropout", dropout), ("mask", mask)) if key is not None}

    def apply(x: Array, noise_label: Array, cond: Cond = None) -> Any:
        return model.apply({"params": params}, x, noise_label, cond, deterministic=not rngs, rngs=rngs or None)

    return apply
