"""KL autoencoders of Stable Diffusion, SDXL, SD3 and FLUX under the names of the diffusers library.

The arrays do not determine the scaling of latents. Kind `sd_vae` uses that of Stable Diffusion 1 and 2 with
four channels and that of SD3 with sixteen, `sdxl_vae` that of SDXL, which has the same arrays as Stable Diffusion.
"""

from __future__ import annotations

import re
from functools import partial

import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from jaxdiff.models import AutoencoderKL, vae
from jaxdiff.trees import Params
from jaxdiff.weights import names
from jaxdiff.weights.names import Arrays, Entry, Fields, Kind, Layout, Path, count_of, shape_of

BLOCK = {"norm0": "norm1", "conv0": "conv1", "norm1": "norm2", "conv1": "conv2", "skip": "conv_shortcut"}
ATTENTION = {"norm": "group_norm", "qkv": "to_q to_k to_v", "out": "to_out.0"}
EARLY_ATTENTION = {"norm": "group_norm", "qkv": "query key value", "out": "proj_attn"}  # files of 2022
TOP = {"in_conv": "conv_in", "out_norm": "conv_norm_out", "out_conv": "conv_out"}
QUANT = {"to_moments": "quant_conv", "from_latent": "post_quant_conv"}


def named(kind: str, arrays: Arrays) -> Kind:
    """The kind under the names these arrays have."""
    if any(".mid.attn_1." in name for name in arrays):
        raise names.WeightsError(
            f"these are the original Stable Diffusion names; kind {kind!r} reads the diffusers layout, "
            "encoder.down_blocks..."
        )
    early = "encoder.mid_block.attentions.0.query.weight" in arrays
    return _kind(kind, EARLY_ATTENTION if early else ATTENTION)


def infer(kind: str, arrays: Arrays) -> Fields:
    """The fields of the AutoencoderKL these arrays belong to; group norms are assumed to have 32 groups."""
    shape = partial(shape_of, kind, arrays)
    width, image_channels = shape("encoder.conv_in.weight")[:2]
    channels = shape("decoder.conv_in.weight")[1]
    levels = range(count_of(arrays, "encoder.down_blocks"))
    return {
        "channels": channels,
        "width": width,
        "channel_mult": tuple(shape(f"encoder.down_blocks.{i}.resnets.0.conv1.weight")[0] // width for i in levels),
        "blocks": count_of(arrays, "encoder.down_blocks.0.resnets"),
        "quant": "quant_conv.weight" in arrays,
        "image_channels": image_channels,
        **_latent_units(kind, channels),
    }


def _latent_units(kind: str, channels: int) -> dict[str, float | None]:
    published = {("sd_vae", 4): "sd", ("sd_vae", 16): "sd3", ("sdxl_vae", 4): "sdxl"}
    if (kind, channels) not in published:
        return {"scale": None, "shift": None}
    model = AutoencoderKL(**vae.SIZES[published[kind, channels]])
    return {"scale": model.scale, "shift": model.shift}


def entries(attention: dict[str, str], model: AutoencoderKL, abstract: Params) -> list[Entry]:
    """The names derived from each path."""
    return [
        Entry(_public_names(attention, model, path), path, _layout(path, leaf.shape))
        for path, leaf in flatten_dict(abstract).items()
    ]


def _public_names(attention: dict[str, str], model: AutoencoderKL, path: Path) -> tuple[str, ...]:
    side, suffix = path[0], "bias" if path[-1] == "bias" else "weight"
    if side in QUANT:
        return (f"{QUANT[side]}.{suffix}",)
    place = re.fullmatch(r"(down|up|mid)(\d*)_(block|attention|conv)(\d*)", path[1])
    if place is None:
        return (f"{side}.{TOP[path[1]]}.{suffix}",)
    way, level, module, index = place.groups()
    number = len(model.channel_mult) - 1 - int(level) if way == "up" else level
    stem = f"{side}.mid_block" if way == "mid" else f"{side}.{way}_blocks.{number}"
    if module == "conv":
        return (f"{stem}.{way}samplers.0.conv.{suffix}",)
    if module == "block":
        return (f"{stem}.resnets.{index}.{BLOCK[path[2]]}.{suffix}",)
    return tuple(f"{stem}.attentions.0.{layer}.{suffix}" for layer in attention[path[2]].split())


def _layout(path: Path, shape: tuple[int, ...]) -> Layout:
    if path[-2] == "qkv":
        return names.split_three(names.qkv_kernel(1) if path[-1] == "kernel" else names.qkv_bias(1))
    if path[-1] != "kernel":
        return names.as_is
    return names.conv if len(shape) == 4 else names.out_kernel(1)


def _kind(name: str, attention: dict[str, str] = ATTENTION) -> Kind:
    return Kind(
        model=AutoencoderKL,
        infer=partial(infer, name),
        entries=partial(entries, attention),
        example=lambda model: (jnp.zeros((1, *[2 ** (len(model.channel_mult) - 1)] * 2, model.image_channels)),),
        named=partial(named, name),
    )


SD, SDXL = _kind("sd_vae"), _kind("sdxl_vae")
