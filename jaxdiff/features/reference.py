"""Names of the reference implementation (Meng et al. 2024) for activations of SD's UNets, PixArt and FLUX.

Its levels count in order of execution, ours from the highest resolution: its up-level0 is our up3 in SD 1.5, our up2 in
SDXL. It names 197 activations of SD 1.5, 612 of SDXL, 224 of PixArt and 266 of FLUX; our catalogue has more. What it
aggregates to `attn` by its option `attention` has a name per stage here, attn-up_cross and attn-down_cross
(attention_maps.py). In FLUX it counts single blocks after the double ones, and q and k are those before their norms.
The `out` of its double blocks is its `norm-out` stored again; here it is what the block returns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from flax import linen as nn

from jaxdiff.models import Flux, LatentUNet, PixArt

RES = {"res-increment": "increment", "res-out": "out"}
VIT = {
    "self-q": "self_attention/q", "self-k": "self_attention/k", "self-v": "self_attention/v",
    "self-map": "self_attention/map", "cross-q": "cross_attention/q", "cross-map": "cross_attention/map",
    "ffn-inner": "mlp/inner", "out": "out",
}  # fmt: skip
FLUX = {"q": "image/q_raw", "k": "image/k_raw", "v": "image/v", "out": "image/out"}
FLUX_DOUBLE = {**FLUX, "norm-out": "image/norm1", "ffn-inner": "image_mlp/inner"}

XL = (
    "up-level0-repeat0-vit-block5-out",
    "up-level0-repeat0-vit-block7-out",
    "up-level1-repeat0-vit-block0-cross-q",
    "up-level1-repeat0-vit-block0-out",
)
AMALGAMATED = (
    "up-level2-repeat1-vit-block0-cross-q",
    "up-level2-upsampler-out",
    "up-level3-repeat0-vit-block0-self-k",
)

# The selections of its tables and configuration files, each for one network: sd1 (SD 1.5), sdxl, pgv2 (Playground v2,
# an SDXL UNet). "legacy" is the choice of earlier work. Its Ours-XL-t joins the features of several networks:
#     correspondence, Horse-21    sdxl + pgv2 + sd1_amalgamation
#     ADE20K, Cityscapes          sdxl_segmentation + pgv2_segmentation
SELECTIONS: dict[str, tuple[str, ...]] = {
    "sd1_legacy": (
        "up-level0-upsampler-out",
        "up-level1-upsampler-out",
        "up-level2-upsampler-out",
        "up-level3-repeat2-vit-out",
    ),
    "sd1": (
        "up-level1-repeat1-vit-block0-cross-q",
        "up-level1-repeat2-res-out",
        "up-level2-repeat1-vit-block0-cross-q",
        "up-level3-repeat0-vit-block0-self-k",
    ),
    "sd1_amalgamation": ("up-level1-repeat1-vit-block0-cross-q", *AMALGAMATED, "attn-up_cross"),
    "sd1_amalgamation_small": AMALGAMATED,
    "sd1_vpd": (  # its Cityscapes setting; that for ADE20K has the first three
        "up-level0-repeat1-res-out",
        "up-level1-repeat1-vit-out",
        "up-level2-repeat1-vit-out",
        "attn-down_cross",
        "attn-up_cross",
    ),
    "sdxl_legacy": ("up-level0-upsampler-out", "up-level1-upsampler-out", "up-level2-repeat2-res-out"),
    "sdxl": XL,
    "sdxl_segmentation": (*XL, "up-level1-upsampler-out"),
    "pgv2": ("up-level0-repeat0-vit-block3-out",),
    "pgv2_segmentation": (
        "up-level0-repeat0-vit-block5-out",
        "up-level1-repeat0-vit-block0-cross-q",
        "up-level1-upsampler-out",
    ),
}


def reference_names(source: nn.Module | Iterable[str]) -> dict[str, str]:
    """Reference name -> ours, for every activation that has one; each of ours appears once.

    `source` is a LatentUNet, a PixArt or a Flux, or the names of a catalogue, which may be those of any network.
    """
    if isinstance(source, LatentUNet):
        return _unet(source.blocks, source.depths, source.mid_depth)
    if isinstance(source, PixArt):
        return _pixart(source.depth)
    if isinstance(source, Flux):
        return _flux(source.depth, source.single_depth)
    if isinstance(source, nn.Module):
        known = "LatentUNet, PixArt and Flux"
        raise ValueError(f"the reference names activations of {known}, not of {type(source).__name__}")
    ours = set(source)
    levels = range(_count(ours, r"(?:down|up)(\d+)_.*"))
    depths = [_count(ours, rf"(?:down|up){level}_transformer\d+/block(\d+)/.*") for level in levels]
    blocks = max(_count(ours, r"down\d+_block(\d+)/.*"), _count(ours, r"up\d+_block(\d+)/.*") - 1)
    found = _pixart(_count(ours, r"blocks_(\d+)/cross_attention/.*"))
    if singles := _count(ours, r"single_(\d+)/.*"):
        found |= _flux(_count(ours, r"blocks_(\d+)/image/.*"), singles)
    if depths:
        found |= _unet(blocks, depths, _count(ours, r"mid_transformer0/block(\d+)/.*"))
        found |= {f"attn-{stage}_cross": f"{stage}/cross_maps" for stage in ("down", "mid", "up")}
    return {theirs: name for theirs, name in found.items() if name in ours}


def _count(names: Iterable[str], pattern: str) -> int:
    """One more than the largest number that the pattern finds in a whole name; 0 without one."""
    return max((1 + int(found[1]) for name in names if (found := re.fullmatch(pattern, name))), default=0)


def _unet(blocks: int, depths: Sequence[int], mid_depth: int) -> dict[str, str]:
    levels = len(depths)
    table = {"unet-in": "in", "unet-after-conv-in": "embedded", "unet-out": "out"}
    for level, depth in enumerate(depths):
        up = levels - 1 - level
        for i in range(blocks):
            table |= _module(f"down-level{level}-repeat{i}", f"down{level}", i, depth)
        for i in range(blocks + 1):
            table |= _module(f"up-level{up}-repeat{i}", f"up{level}", i, depth)
        if level < levels - 1:
            table[f"down-level{level}-downsampler-out"] = f"down{level}_conv"
        if level:
            table[f"up-level{up}-upsampler-out"] = f"up{level}_conv"
    table |= _module("mid-repeat0", "mid", 0, 0) | _module("mid-repeat1", "mid", 1, 0)
    return table | _transformer("mid-vit", "mid_transformer0", mid_depth)


def _module(theirs: str, ours: str, i: int, depth: int) -> dict[str, str]:
    """A residual block, and the transformer that follows it where the level has depth."""
    table = {f"{theirs}-{name}": f"{ours}_block{i}/{tap}" for name, tap in RES.items()}
    if depth:
        table |= _transformer(f"{theirs}-vit", f"{ours}_transformer{i}", depth)
    return table


def _transformer(theirs: str, ours: str, depth: int) -> dict[str, str]:
    blocks = {f"{theirs}-block{b}-{name}": f"{ours}/block{b}/{tap}" for b in range(depth) for name, tap in VIT.items()}
    return blocks | {f"{theirs}-out": f"{ours}/out"}


def _pixart(depth: int) -> dict[str, str]:
    taps = {name: tap.removeprefix("self_") for name, tap in VIT.items()}
    return {f"vit-block{i}-{name}": f"blocks_{i}/{tap}" for i in range(depth) for name, tap in taps.items()}


def _flux(depth: int, single_depth: int) -> dict[str, str]:
    double = {f"vit-block{i}-{name}": f"blocks_{i}/{tap}" for i in range(depth) for name, tap in FLUX_DOUBLE.items()}
    places = [(f"vit-block{depth + i}", f"single_{i}") for i in range(single_depth)]
    return double | {f"{theirs}-{name}": f"{ours}/{tap}" for theirs, ours in places for name, tap in FLUX.items()}
