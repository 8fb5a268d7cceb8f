"""EDM checkpoints (names under `model.`): DDPM++, NCSN++ and ADM UNets, distinguished by names and shapes."""

from __future__ import annotations

import re

from flax.traverse_util import flatten_dict

from jaxdiff.conventions import EDM
from jaxdiff.models import UNet
from jaxdiff.trees import Params
from jaxdiff.weights import names
from jaxdiff.weights.names import Arrays, Entry, Fields, Layout, Path, shape_of


def infer(arrays: Arrays) -> Fields:
    """The fields of the UNet these arrays belong to."""
    sides = sorted({int(side) for name in arrays for side in re.findall(r"^model\.enc\.(\d+)x\1_", name)}, reverse=True)
    if not sides:
        raise names.WeightsError(
            f"not an 'edm' checkpoint: none of its {len(arrays)} names looks like model.enc.32x32_conv.weight"
        )
    first = f"model.enc.{sides[0]}x{sides[0]}"
    width, channels = shape_of("edm", arrays, f"{first}_conv.weight")[:2]
    return {
        "style": _style(arrays),
        "resolution": sides[0],
        "channels": channels,
        "width": width,
        "channel_mult": tuple(
            shape_of("edm", arrays, f"model.enc.{s}x{s}_block0.conv1.weight")[0] // width for s in sides
        ),
        "blocks": sum(f"{first}_block{i}.conv0.weight" in arrays for i in range(len(arrays))),
        "attention": tuple(s for s in sides if f"model.enc.{s}x{s}_block0.qkv.weight" in arrays),
        "num_classes": _inputs(arrays, "model.map_label.weight"),
        "augment_dim": _inputs(arrays, "model.map_augment.weight"),
    }


def _style(arrays: Arrays) -> str:
    if "model.out_norm.weight" in arrays:
        return "adm"
    if "model.map_noise.freqs" in arrays:
        return "ncsnpp"
    return "ddpmpp"


def _inputs(arrays: Arrays, name: str) -> int:
    """The input width of an optional layer."""
    return arrays[name].shape[1] if name in arrays else 0


def entries(model: UNet, abstract: Params) -> list[Entry]:
    """One public array per parameter, the name derived from the path."""
    return [
        Entry((_public_name(model, path),), path, _layout(model, path, leaf.shape))
        for path, leaf in flatten_dict(abstract).items()
    ]


def _public_name(model: UNet, path: Path) -> str:
    if path == ("map_noise",):
        return "model.map_noise.freqs"
    top, *inner, leaf = path
    side = f"{model.resolution}x{model.resolution}"
    if model.style != "adm" and top.startswith("out_"):
        top = f"dec.{side}_aux_{top.removeprefix('out_')}"
    top = re.sub("^(enc|dec)_", r"\1.", top)
    inner = ["proj" if part == "out" else part for part in inner]
    return ".".join(["model", top, *inner, "bias" if leaf == "bias" else "weight"])


def _layout(model: UNet, path: Path, shape: tuple[int, ...]) -> Layout:
    layer, leaf = path[-2:] if len(path) > 1 else ("", path[0])
    if layer == "qkv":
        return _qkv_kernel(shape[2]) if leaf == "kernel" else _qkv_bias(shape[1])
    if layer == "out" and leaf == "kernel":
        heads = names.out_kernel(shape[0])
        return Layout(lambda w: heads.to_ours(w[:, :, 0, 0]), lambda k: (heads.to_public(k)[0][:, :, None, None],))
    if leaf == "kernel":
        return names.conv if len(shape) == 4 else names.dense
    return names.as_is


def _qkv_kernel(heads: int) -> Layout:
    """Output channel (head, channel, role), role fastest <-> [in, 3, heads, head width]."""
    return Layout(
        lambda w: w.reshape(heads, -1, 3, w.shape[1]).transpose(3, 2, 0, 1),
        lambda k: (k.transpose(2, 3, 1, 0).reshape(-1, k.shape[0], 1, 1),),
    )


def _qkv_bias(heads: int) -> Layout:
    return Layout(lambda b: b.reshape(heads, -1, 3).transpose(2, 0, 1), lambda b: (b.transpose(1, 2, 0).reshape(-1),))


KIND = names.Kind(
    model=UNet,
    infer=infer,
    entries=entries,
    conventions=(EDM(),),
    ignored=lambda name: name.endswith("resample_filter"),
)
