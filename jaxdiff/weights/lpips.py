"""LPIPS under the names of the lpips package, of torchvision with the heads of that package, or of our own paths.

    net.slice1.0.weight, lin0.model.1.weight   a state dict of lpips.LPIPS; what `save` writes
    features.0.weight,   lin0.model.1.weight   torchvision's AlexNet or VGG-16, and weights/v0.1 of the package
    conv0.kernel,        lin0                  flat names over HWIO kernels

Numbers in the first two are indices in torchvision's list of layers, including ReLUs and pools.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from jaxdiff.models.lpips import LPIPS, NETS, SCALE, SHIFT
from jaxdiff.trees import Params
from jaxdiff.weights import names
from jaxdiff.weights.names import Arrays, Entry, Fields, Kind, Layout, shape_of

head = Layout(lambda w: w.reshape(-1), lambda w: (w.reshape(1, -1, 1, 1),))  # a 1x1 convolution to one channel
REPEATED = {f"lins.{i}.model.1.weight" for i in range(5)}  # duplicates of the heads


def named(arrays: Arrays) -> Kind:
    """The kind under the names these arrays have."""
    if "features.0.weight" in arrays:
        return TORCHVISION
    if "conv0.kernel" in arrays:
        return FLAT
    if "lin0.model.1.weight" in arrays and not any(name.startswith("net.") for name in arrays):
        raise names.WeightsError(
            "these are the heads of LPIPS without its network; merge them with torchvision's state dict, "
            "load({**network, **heads}, 'lpips')"
        )
    return KIND


def _infer(name: str, side: int) -> Callable[[Arrays], Fields]:
    """The network from the side of its first kernel, along axis `side` of array `name`."""

    def infer(arrays: Arrays) -> Fields:
        shape = shape_of("lpips", arrays, name)
        sides = {trunk.stages[0][0].kernel: net for net, trunk in NETS.items()}
        if len(shape) != 4 or shape[side] not in sides:
            raise names.WeightsError(
                f"{name!r} is {shape}: neither the 11x11 kernel of AlexNet nor the 3x3 one of VGG-16; "
                "only these two networks are supported"
            )
        return {"net": sides[shape[side]]}

    return infer


def _places(model: LPIPS) -> Iterator[tuple[int, int]]:
    """(stage from 1, place in torchvision's list) of every convolution."""
    place = 0
    for i, stage in enumerate(NETS[model.net].stages):
        place += i in NETS[model.net].pooled
        for _ in stage:
            yield i + 1, place
            place += 2


def _entries(convolution: str) -> Callable[[LPIPS, Params], list[Entry]]:
    """The map of the names that torch has, `convolution` a pattern of stage and place."""

    def entries(model: LPIPS, abstract: Params) -> list[Entry]:
        out = [Entry((f"lin{i}.model.1.weight",), (f"lin{i}",), head) for i in range(5)]
        for i, (stage, place) in enumerate(_places(model)):
            public = convolution.format(stage=stage, place=place)
            out += names.dense_entries(public, (f"conv{i}",), names.conv)
        return out

    return entries


def _flat(model: LPIPS, abstract: Params) -> list[Entry]:
    return [Entry((".".join(path),), path, names.as_is) for path in flatten_dict(abstract)]


def _constants(prefix: str, *shape: int) -> Callable[[LPIPS], dict[str, np.ndarray]]:
    values = {"shift": SHIFT, "scale": SCALE}
    return lambda model: {
        f"{prefix}{name}": np.array(value, np.float32).reshape(shape) for name, value in values.items()
    }


KIND = Kind(
    model=LPIPS,
    infer=_infer("net.slice1.0.weight", 2),
    entries=_entries("net.slice{stage}.{place}"),
    constants=_constants("scaling_layer.", 1, 3, 1, 1),
    ignored=lambda name: name in REPEATED,
    example=lambda model: (jnp.zeros((1, 32, 32, 3)),) * 2,
    named=named,
)
TORCHVISION = KIND._replace(
    infer=_infer("features.0.weight", 2),
    entries=_entries("features.{place}"),
    ignored=lambda name: name in REPEATED or name.startswith("classifier."),
)
FLAT = KIND._replace(infer=_infer("conv0.kernel", 0), entries=_flat, constants=_constants("", 3))
