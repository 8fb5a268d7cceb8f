"""Names of the reference implementation (Meng et al. 2024) for activations of Stable Diffusion's UNets, and back.

Its levels count in order of execution, ours from the highest resolution: its up-level0 is our up3 in SD 1.5, our up2 in
SDXL. It names 197 activations of SD 1.5 and 612 of SDXL; our catalogue has more.
"""

from __future__ import annotations

from jaxdiff.models import LatentUNet

RES = {"res-increment": "increment", "res-out": "out"}
VIT = {
    "self-q": "self_attention/q", "self-k": "self_attention/k", "self-v": "self_attention/v",
    "self-map": "self_attention/map", "cross-q": "cross_attention/q", "cross-map": "cross_attention/map",
    "ffn-inner": "mlp/inner", "out": "out",
}  # fmt: skip

# the selections in its tables: those of earlier work (legacy), and its own
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
    "sdxl_legacy": ("up-level0-upsampler-out", "up-level1-upsampler-out", "up-level2-repeat2-res-out"),
    "sdxl": (
        "up-level0-repeat0-vit-block5-out",
        "up-level0-repeat0-vit-block7-out",
        "up-level1-repeat0-vit-block0-cross-q",
        "up-level1-repeat0-vit-block0-out",
    ),
}


def reference_names(model: LatentUNet) -> dict[str, str]:
    """Reference name -> ours, for every activation that has one; each of ours appears once."""
    levels = len(model.channel_mult)
    table = {"unet-in": "in", "unet-after-conv-in": "embedded", "unet-out": "out"}
    for level, depth in enumerate(model.depths):
        up = levels - 1 - level
        for i in range(model.blocks):
            table |= _module(f"down-level{level}-repeat{i}", f"down{level}", i, depth)
        for i in range(model.blocks + 1):
            table |= _module(f"up-level{up}-repeat{i}", f"up{level}", i, depth)
        if level < levels - 1:
            table[f"down-level{level}-downsampler-out"] = f"down{level}_conv"
        if level:
            table[f"up-level{up}-upsampler-out"] = f"up{level}_conv"
    table |= _module("mid-repeat0", "mid", 0, 0) | _module("mid-repeat1", "mid", 1, 0)
    return table | _transformer("mid-vit", "mid_transformer0", model.mid_depth)


def _module(theirs: str, ours: str, i: int, depth: int) -> dict[str, str]:
    """A residual block, and the transformer that follows it where the level has depth."""
    table = {f"{theirs}-{name}": f"{ours}_block{i}/{tap}" for name, tap in RES.items()}
    if depth:
        table |= _transformer(f"{theirs}-vit", f"{ours}_transformer{i}", depth)
    return table


def _transformer(theirs: str, ours: str, depth: int) -> dict[str, str]:
    blocks = {f"{theirs}-block{b}-{name}": f"{ours}/block{b}/{tap}" for b in range(depth) for name, tap in VIT.items()}
    return blocks | {f"{theirs}-out": f"{ours}/out"}
