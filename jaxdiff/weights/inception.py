"""The FID Inception-v3 under the names of its PyTorch port (those of torchvision's Inception-v3)."""

from __future__ import annotations

import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from jaxdiff.models.inception import Inception
from jaxdiff.trees import Params
from jaxdiff.weights import names
from jaxdiff.weights.names import Arrays, Entry, Fields, Path, shape_of

NORM = {"scale": "weight", "bias": "bias", "mean": "running_mean", "var": "running_var"}


def infer(arrays: Arrays) -> Fields:
    """The number of logits, 0 in files without `fc`; everything else about this network is fixed."""
    if any(name.startswith("AuxLogits.") for name in arrays):
        raise names.WeightsError(
            "these are torchvision's own ImageNet weights (they have AuxLogits); FID is defined by the weights of "
            "2015-12-05, which pytorch-fid distributes as pt_inception-2015-12-05"
        )
    shape_of("inception", arrays, "Conv2d_1a_3x3.conv.weight")
    return {"num_classes": arrays["fc.weight"].shape[0] if "fc.weight" in arrays else 0}


def entries(model: Inception, abstract: Params) -> list[Entry]:
    """One public array per parameter, the name derived from the path."""
    return [_entry(path) for path in flatten_dict(abstract)]


def _entry(path: Path) -> Entry:
    *layer, leaf = path
    prefix = ".".join(layer)
    if layer == ["fc"]:
        if leaf == "kernel":
            return Entry(("fc.weight",), path, names.dense)
        return Entry(("fc.bias",), path, names.as_is)
    if leaf == "kernel":
        return Entry((f"{prefix}.conv.weight",), path, names.conv)
    return Entry((f"{prefix}.bn.{NORM[leaf]}",), path, names.as_is)


KIND = names.Kind(
    model=Inception,
    infer=infer,
    entries=entries,
    example=lambda model: (jnp.zeros((1, 75, 75, 3)),),
    ignored=lambda name: name.endswith("num_batches_tracked"),
)
