"""EfficientNet-Lite0 with batch norm folded, as flat names over Flax kernels: `block3.expand.kernel`, `head.bias`."""

from __future__ import annotations

import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from jaxdiff.models.efficientnet import EfficientNetLite0
from jaxdiff.trees import Params
from jaxdiff.weights import names
from jaxdiff.weights.names import Arrays, Entry, Fields, shape_of


def infer(arrays: Arrays) -> Fields:
    """The number of classes; everything else about this network is fixed."""
    return {"num_classes": shape_of("efficientnet_lite0", arrays, "fc.bias")[0]}


def entries(model: EfficientNetLite0, abstract: Params) -> list[Entry]:
    """The path joined by dots, arrays as they are."""
    return [Entry((".".join(path),), path, names.as_is) for path in flatten_dict(abstract)]


KIND = names.Kind(
    model=EfficientNetLite0,
    infer=infer,
    entries=entries,
    example=lambda model: (jnp.zeros((1, 32, 32, 3)),),
)
