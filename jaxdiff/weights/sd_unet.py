"""UNets of Stable Diffusion 1, 2 and SDXL under the names of the diffusers library.

Their denoisers predict eps. The 768-pixel SD 2 predicts v: wrap its network in `denoisers.ddpm(..., prediction="v")`.
"""

from __future__ import annotations

import re
from functools import partial

from flax.traverse_util import flatten_dict

from jaxdiff.conventions import DDPM
from jaxdiff.models import LatentUNet
from jaxdiff.trees import Params
from jaxdiff.weights import names
from jaxdiff.weights.names import Arrays, Entry, Fields, Layout, Path, count_of, shape_of

POOLED, SIZE_WIDTH = 1280, 256  # of every published SDXL; the arrays determine only the total width

# our layer -> the public layers it consists of, within its module
TOP = {
    "in_conv": "conv_in", "out_norm": "conv_norm_out", "out_conv": "conv_out",
    "time/in": "time_embedding.linear_1", "time/out": "time_embedding.linear_2",
    "added/in": "add_embedding.linear_1", "added/out": "add_embedding.linear_2",
}  # fmt: skip
BLOCK = {
    "norm0": "norm1", "conv0": "conv1", "embed": "time_emb_proj", "norm1": "norm2", "conv1": "conv2",
    "skip": "conv_shortcut",
}  # fmt: skip
TRANSFORMER = {
    "norm": "norm", "in": "proj_in", "out": "proj_out",
    "norm0": "norm1", "norm1": "norm2", "norm2": "norm3",
    "self_attention/qkv": "attn1.to_q attn1.to_k attn1.to_v", "self_attention/out": "attn1.to_out.0",
    "cross_attention/q": "attn2.to_q", "cross_attention/kv": "attn2.to_k attn2.to_v",
    "cross_attention/out": "attn2.to_out.0",
    "mlp/in": "ff.net.0.proj", "mlp/out": "ff.net.2",
}  # fmt: skip


# ------------------------------------------------------------------------------------------ the architecture


def infer(kind: str, arrays: Arrays) -> Fields:
    """The fields of the LatentUNet these arrays belong to.

    The heads are assumed: 8 at every level if projections are convolutions (SD 1), else 64 channels each.
    """
    _check_kind(kind, arrays)
    shape = partial(shape_of, kind, arrays)
    width, channels = shape("conv_in.weight")[:2]
    levels = count_of(arrays, "down_blocks")
    projection = shape("mid_block.attentions.0.proj_in.weight")
    linear = len(projection) == 2
    added = {}
    if kind == "sdxl_unet":
        added = _added(shape("add_embedding.linear_1.weight")[1])
    return {
        "channels": channels,
        "width": width,
        "channel_mult": tuple(shape(f"down_blocks.{i}.resnets.0.conv1.weight")[0] // width for i in range(levels)),
        "blocks": count_of(arrays, "down_blocks.0.resnets"),
        "depths": tuple(count_of(arrays, f"down_blocks.{i}.attentions.0.transformer_blocks") for i in range(levels)),
        "mid_depth": count_of(arrays, "mid_block.attentions.0.transformer_blocks"),
        "heads": 0 if linear else 8,
        "head_width": 64 if linear else 0,
        "text_dim": shape("mid_block.attentions.0.transformer_blocks.0.attn2.to_k.weight")[1],
        "linear": linear,
        **added,
    }


def _check_kind(kind: str, arrays: Arrays) -> None:
    if any("input_blocks." in name for name in arrays):
        raise names.WeightsError(
            f"these are the original Stable Diffusion names; kind {kind!r} reads the diffusers layout, down_blocks..."
        )
    if kind == "sd_unet" and "add_embedding.linear_1.weight" in arrays:
        raise names.WeightsError("these arrays have an add_embedding, as in SDXL; load them as kind 'sdxl_unet'")


def _added(total: int) -> Fields:
    """Pooled text of the published width, and sizes that fill the rest; None if they do not divide it."""
    sizes, rest = divmod(total - POOLED, SIZE_WIDTH)
    if sizes < 0 or rest:
        return {"pooled_dim": None, "sizes": None, "size_width": None}
    return {"pooled_dim": POOLED, "sizes": sizes, "size_width": SIZE_WIDTH}


# ------------------------------------------------------------------------------------------ names and layouts


def entries(model: LatentUNet, abstract: Params) -> list[Entry]:
    """The names derived from each path; the embedding of `step` has no public counterpart."""
    return [
        Entry(_public_names(model, path), path, _layout(model, path, leaf.shape))
        for path, leaf in flatten_dict(abstract).items()
        if path[0] != "step"
    ]


def _public_names(model: LatentUNet, path: Path) -> tuple[str, ...]:
    top, leaf = path[0], path[-1]
    suffix = "bias" if leaf == "bias" else "weight"
    place = re.fullmatch(r"(down|up|mid)(\d*)_(block|transformer)?(\d+|conv)", top)
    if place is None:
        return (f"{TOP['/'.join(path[:-1])]}.{suffix}",)
    side, level, module, index = place.groups()
    number = len(model.channel_mult) - 1 - int(level) if side == "up" else level
    stem = "mid_block" if side == "mid" else f"{side}_blocks.{number}"
    if module is None:
        return (f"{stem}.{side}samplers.0.conv.{suffix}",)
    if module == "block":
        return (f"{stem}.resnets.{index}.{BLOCK[path[1]]}.{suffix}",)
    stem, inner = f"{stem}.attentions.{index}", path[1:-1]
    if block := re.fullmatch(r"block(\d+)", path[1]):
        stem, inner = f"{stem}.transformer_blocks.{block[1]}", path[2:-1]
    return tuple(f"{stem}.{layer}.{suffix}" for layer in TRANSFORMER["/".join(inner)].split())


def _layout(model: LatentUNet, path: Path, shape: tuple[int, ...]) -> Layout:
    parent, layer, leaf = ("", "", *path)[-3:]
    if (parent, layer) == ("mlp", "in"):
        return GATED_KERNEL if leaf == "kernel" else GATED_BIAS
    if leaf != "kernel":
        return names.as_is
    if layer == "qkv":
        return names.split_three(names.qkv_kernel(shape[2]))
    if layer == "q":
        return names.query_kernel(shape[1])
    if layer == "kv":
        return names.split_rows(names.qkv_kernel(shape[2], 2), 2)
    if parent.endswith("_attention"):
        return names.out_kernel(shape[0])
    if "transformer" in parent and not model.linear:
        return POINTWISE
    return names.conv if len(shape) == 4 else names.dense


# [out, in, 1, 1] <-> [in, out]
POINTWISE = Layout(lambda w: w[:, :, 0, 0].T, lambda k: (k.T[:, :, None, None],))
# rows [values; gates] <-> [in, 2, 4 in]
GATED_KERNEL = Layout(
    lambda w: w.reshape(2, -1, w.shape[1]).transpose(2, 0, 1),
    lambda k: (k.transpose(1, 2, 0).reshape(-1, k.shape[0]),),
)
GATED_BIAS = Layout(lambda b: b.reshape(2, -1), lambda b: (b.reshape(-1),))


def _kind(name: str) -> names.Kind:
    return names.Kind(
        model=LatentUNet,
        infer=partial(infer, name),
        entries=entries,
        conventions=(DDPM("sqrt_linear", "eps"), DDPM("sqrt_linear", "v")),  # v: some of Stable Diffusion 2
    )


SD, SDXL = _kind("sd_unet"), _kind("sdxl_unet")
