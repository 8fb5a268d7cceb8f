"""TAESD under the names of the diffusers library, of its own repository, or of the latter over HWIO kernels.

    encoder.layers.0.weight, decoder.layers.0.weight   AutoencoderTiny of diffusers; what `save` writes
    encoder.0.weight,        decoder.1.weight          the TAESD repository
    encoder.0.kernel,        decoder.1.kernel          the same as flat names over Flax arrays

Numbers are indices in a list of layers that includes ReLUs, upsamplings and, in the repository, the decoder's tanh.
"""

from __future__ import annotations

import re
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from jaxdiff.models import TAESD
from jaxdiff.trees import Params
from jaxdiff.weights import names
from jaxdiff.weights.names import Arrays, Entry, Fields, Kind, Path, shape_of

BLOCK = {
    "conv0": "conv.0", "conv1": "conv.2", "conv2": "conv.4", "pool_in": "pool.0", "pool_norm": "pool.1",
    "pool_out": "pool.3",
}  # fmt: skip


class Naming(NamedTuple):
    """One of the three naming schemes."""

    prefix: str  # between encoder or decoder and the place
    first: int  # the place of the decoder's first convolution
    ours: bool  # kernel, scale and HWIO instead of weight and OIHW


DIFFUSERS, REPOSITORY, FLAT = Naming("layers.", 0, False), Naming("", 1, False), Naming("", 1, True)


def named(arrays: Arrays) -> Kind:
    """The kind under the names these arrays have."""
    if "0.weight" in arrays or "1.weight" in arrays:
        raise names.WeightsError(
            "this is only the encoder or decoder of TAESD; pass both, with prefixed names: "
            "{f'encoder.{name}': array, ..., f'decoder.{name}': array, ...}"
        )
    if "encoder.0.kernel" in arrays:
        return _kind(FLAT)
    return _kind(REPOSITORY if "encoder.0.weight" in arrays else DIFFUSERS)


def infer(naming: Naming, arrays: Arrays) -> Fields:
    """The fields of the TAESD these arrays belong to."""
    stem, leaf = f"encoder.{naming.prefix}", "kernel" if naming.ours else "weight"
    inputs, outputs = (-2, -1) if naming.ours else (1, 0)
    first = shape_of("taesd", arrays, f"{stem}0.{leaf}")
    blocks = [(int(m[1]), m[2]) for m in (re.match(rf"{re.escape(stem)}(\d+)\.(\w+)\.", name) for name in arrays) if m]
    places = {place for place, _ in blocks}
    counts = [0]  # an index without a block is the convolution between two levels
    for place in range(1, max(places, default=0) + 1):
        if place in places:
            counts[-1] += 1
        else:
            counts.append(0)
    last = shape_of("taesd", arrays, f"{stem}{max(places, default=0) + 1}.{leaf}")
    return {
        "channels": last[outputs],
        "width": first[outputs],
        "blocks": tuple(counts),
        "pool": any(module == "pool" for _, module in blocks),
        "image_channels": first[inputs],
    }


def entries(naming: Naming, model: TAESD, abstract: Params) -> list[Entry]:
    places = {"encoder": _encoder_places(model), "decoder": _decoder_places(model, naming.first)}
    return [_entry(naming, places[path[0]][path[1]], path) for path in flatten_dict(abstract)]


def _entry(naming: Naming, place: int, path: Path) -> Entry:
    side, *inner, leaf = path
    layers = [f"{side}.{naming.prefix}{place}", *(BLOCK[layer] for layer in inner[1:])]
    if naming.ours:
        return Entry((".".join([*layers, leaf]),), path, names.as_is)
    suffix = "bias" if leaf == "bias" else "weight"
    return Entry((".".join([*layers, suffix]),), path, names.conv if leaf == "kernel" else names.as_is)


def _encoder_places(model: TAESD) -> dict[str, int]:
    order = ["in_conv"]
    for level, count in enumerate(model.blocks):
        order += [f"down{level - 1}_conv"] * bool(level) + [f"down{level}_block{i}" for i in range(count)]
    return {layer: place for place, layer in enumerate([*order, "out_conv"])}


def _decoder_places(model: TAESD, first: int) -> dict[str, int]:
    order = ["in_conv", "relu"]
    for level in reversed(range(len(model.blocks))):
        order += [f"up{level}_block{i}" for i in range(model.blocks[level])]
        order += ["upsampling", f"up{level}_conv"] * bool(level)
    return {layer: place for place, layer in enumerate([*order, "out_conv"], first)}


def _kind(naming: Naming) -> Kind:
    return Kind(
        model=TAESD,
        infer=partial(infer, naming),
        entries=partial(entries, naming),
        example=lambda model: (jnp.zeros((1, *[2 ** (len(model.blocks) - 1)] * 2, model.image_channels)),),
        named=named,
    )


KIND = _kind(DIFFUSERS)
