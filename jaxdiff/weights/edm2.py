"""EDM2 checkpoints: the UNet under `unet.`, and its uncertainty under `logvar_fourier.` and `logvar_linear.`."""

from __future__ import annotations

import re

from flax.traverse_util import flatten_dict

from jaxdiff.conventions import EDM
from jaxdiff.models import EDM2
from jaxdiff.trees import Params
from jaxdiff.weights import names
from jaxdiff.weights.names import Arrays, Entry, Fields, Layout, Path, shape_of

TOP = {"map_noise": "emb_noise", "map_label": "emb_label", "noise_fourier": "emb_fourier"}
LAYERS = {
    "conv0": "conv_res0",
    "conv1": "conv_res1",
    "skip": "conv_skip",
    "affine": "emb_linear",
    "qkv": "attn_qkv",
    "out": "attn_proj",
}
LEAVES = {"kernel": "weight", "frequencies": "freqs", "gain": "emb_gain"}


def infer(arrays: Arrays) -> Fields:
    """The fields of the network these arrays belong to; balances and channels per head are the published ones."""
    sides = {int(side) for name in arrays for side in re.findall(r"^unet\.enc\.(\d+)x\1_", name)}
    if not sides:
        raise names.WeightsError(
            f"not an 'edm2' checkpoint: none of its {len(arrays)} names looks like unet.enc.64x64_conv.weight"
        )
    levels = sorted(sides, reverse=True)
    first = f"unet.enc.{levels[0]}x{levels[0]}"
    widths = [shape_of("edm2", arrays, f"unet.dec.{s}x{s}_block0.conv_res1.weight")[0] for s in levels]
    embed, noise = shape_of("edm2", arrays, "unet.emb_noise.weight")
    width = widths[0]
    for divisor in widths:  # a level may be narrower than the first
        width = _common(width, divisor)
    label = arrays.get("unet.emb_label.weight")
    return {
        "resolution": levels[0],
        "channels": shape_of("edm2", arrays, "unet.out_conv.weight")[0],
        "width": width,
        "channel_mult": tuple(other // width for other in widths),
        "blocks": sum(f"{first}_block{i}.conv_res0.weight" in arrays for i in range(len(arrays))),
        "attention": tuple(s for s in levels if f"unet.dec.{s}x{s}_block0.attn_qkv.weight" in arrays),
        "attend_between": f"unet.dec.{levels[-1]}x{levels[-1]}_in0.attn_qkv.weight" in arrays,
        "num_classes": 0 if label is None else label.shape[1],
        "noise_channels": noise,
        "embed_channels": embed,
        "uncertainty_channels": shape_of("edm2", arrays, "logvar_linear.weight")[1],
    }


def _common(a: int, b: int) -> int:
    while b:
        a, b = b, a % b
    return a


def entries(model: EDM2, abstract: Params) -> list[Entry]:
    """One public array per parameter, the name derived from the path."""
    leaves = flatten_dict(abstract).items()
    return [Entry((_public_name(path),), path, _layout(path, leaf.shape)) for path, leaf in leaves]


def _public_name(path: Path) -> str:
    if len(path) == 1:
        return f"unet.{path[0]}"
    top, *inner, leaf = path
    if top == "uncertainty":
        return f"logvar_{inner[0]}.{LEAVES.get(leaf, leaf)}"
    top = re.sub("^(enc|dec)_", r"\1.", TOP.get(top, top))
    return ".".join(["unet", top, *(LAYERS[layer] for layer in inner), LEAVES.get(leaf, leaf)])


def _layout(path: Path, shape: tuple[int, ...]) -> Layout:
    if path[-1] != "kernel":
        return names.as_is
    if path[-2] == "qkv":
        return _qkv(shape[2])
    if path[-2] == "out":
        heads = names.out_kernel(shape[0])
        return Layout(lambda w: heads.to_ours(w[:, :, 0, 0]), lambda k: (heads.to_public(k)[0][:, :, None, None],))
    return names.conv if len(shape) == 4 else names.dense


def _qkv(heads: int) -> Layout:
    """Output channel (head, channel, role), role fastest <-> [in, 3, heads, head width]."""
    return Layout(
        lambda w: w.reshape(heads, -1, 3, w.shape[1]).transpose(3, 2, 0, 1),
        lambda k: (k.transpose(2, 3, 1, 0).reshape(-1, k.shape[0], 1, 1),),
    )


KIND = names.Kind(model=EDM2, infer=infer, entries=entries, conventions=(EDM(),))
