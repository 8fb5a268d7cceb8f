"""Networks in Flax Linen, NHWC, all called as `model(x, noise_label, cond=None, *, deterministic=True)`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Dtype
from jax import Array

from jaxdiff import outside
from jaxdiff.denoisers import Cond, Network
from jaxdiff.errors import choose, pick
from jaxdiff.models import (
    checks,
    clip,
    conditioning,
    dit,
    edm2,
    flux,
    latent_unet,
    mdt,
    mmdit,
    pixart,
    stacks,
    t5,
    unet,
    vae,
)
from jaxdiff.models.clip import CLIPText, CLIPVision
from jaxdiff.models.dit import DiT
from jaxdiff.models.edm2 import EDM2
from jaxdiff.models.efficientnet import EfficientNetLite0
from jaxdiff.models.flux import Flux
from jaxdiff.models.inception import Inception
from jaxdiff.models.latent_unet import LatentUNet
from jaxdiff.models.lpips import LPIPS
from jaxdiff.models.mdt import MDT
from jaxdiff.models.mlp import MLP
from jaxdiff.models.mmdit import MMDiT
from jaxdiff.models.pixart import PixArt
from jaxdiff.models.plain import Plain, from_nnx, model_class
from jaxdiff.models.t5 import T5Encoder
from jaxdiff.models.taesd import TAESD
from jaxdiff.models.unet import UNet
from jaxdiff.models.vae import AutoencoderKL
from jaxdiff.trees import Params

DTYPES: dict[str, Dtype] = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}  # of network compute
MODELS: dict[str, type[nn.Module]] = {
    "unet": UNet,
    "dit": DiT,
    "mmdit": MMDiT,
    "mlp": MLP,
    "latent_unet": LatentUNet,
    "mdt": MDT,
    "pixart": PixArt,
    "edm2": EDM2,
    "flux": Flux,
}

__all__ = [
    "DTYPES",
    "EDM2",
    "LPIPS",
    "MDT",
    "MLP",
    "MODELS",
    "TAESD",
    "AutoencoderKL",
    "CLIPText",
    "CLIPVision",
    "DiT",
    "EfficientNetLite0",
    "Flux",
    "Inception",
    "LatentUNet",
    "MMDiT",
    "PixArt",
    "Plain",
    "T5Encoder",
    "UNet",
    "bind",
    "build",
    "check_fields",
    "clip",
    "conditioning",
    "dit",
    "edm2",
    "find",
    "flux",
    "from_nnx",
    "latent_unet",
    "mdt",
    "mmdit",
    "pixart",
    "stacks",
    "t5",
    "unet",
    "vae",
]


def find(name: str) -> type[nn.Module]:
    """The class of a network: a name in MODELS, or FILE.py:NAME or module:NAME of one from outside the package."""
    if outside.is_reference(name):
        return model_class(outside.attribute(name), name)
    return model_class(pick(MODELS, name, "model"), name)


def build(name: str, **fields: Any) -> nn.Module:
    """A model by its name, as `find` takes it; unknown names and impossible fields are rejected.

    `control` may be a dict.
    """
    model = find(name)
    check_fields(model, fields)
    if isinstance(fields.get("control"), Mapping):
        fields["control"] = conditioning.make_control(fields["control"])
    network = model(**fields)
    checks.check_sizes(network)
    return network


def check_fields(model: type[nn.Module], fields: Iterable[str]) -> None:
    """Reject names in `fields` that are not fields of the model."""
    allowed = [field for field in model.__dataclass_fields__ if field not in ("parent", "name")]
    for field in fields:
        choose(field, allowed, f"{model.__name__} field")


def bind(model: nn.Module, params: Params, dropout: Array | None = None, mask: Array | None = None) -> Network:
    """The function `(x, noise_label, cond) -> array` that denoisers wrap.

    A `dropout` key enables dropout; a `mask` key enables token masking in models that support it (MDT).
    """
    rngs = {name: key for name, key in (("dropout", dropout), ("mask", mask)) if key is not None}

    def apply(x: Array, noise_label: Array, cond: Cond = None) -> Any:
        return model.apply({"params": params}, x, noise_label, cond, deterministic=not rngs, rngs=rngs or None)

    return apply
