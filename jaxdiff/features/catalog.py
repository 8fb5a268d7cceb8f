"""The activations of a network: names, shapes, kinds, stages and costs, by abstract tracing.

A name is the path of the module in the parameter tree and the name of the tap in it: up2_transformer0/block0/out.
The tables below map its last parts to a kind and its first part to a stage. Attention maps of a stage are also offered
aggregated to one activation over the image, at the end of the catalogue: up/cross_maps (attention_maps.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jax.typing import DTypeLike

from jaxdiff import flops
from jaxdiff.conditions import Cond
from jaxdiff.features import attention_maps
from jaxdiff.models import taps
from jaxdiff.trees import AnyArray, Params

# (pattern of a name, kind); the first that matches the whole name
KIND_PATTERNS = [
    (re.compile(pattern), kind)
    for pattern, kind in [
        (r"in|embedded|out", r"\g<0>"),
        (r"(?:.*/)?(?:self_)?attention/(\w+)", r"self_\1"),
        (r".*cross_attention/(\w+)", r"cross_\1"),
        (r".*joint/map", "joint_map"),
        (rf".*/{attention_maps.NAME}", "maps"),
        (r".*(?:image|alone)/attention", "self_out"),
        (r".*alone/([qkv])", r"alone_\1"),
        (r".*(?:image|alone)/([qk])_raw", r"raw_\1"),
        (r".*text/(\w+)", r"text_\1"),
        (r".*text_mlp/(\w+)", r"text_mlp_\1"),
        (r".*image/([qkv])", r"self_\1"),
        (r".*mlp/inner", "inner"),
        (r".*mlp/out", "mlp_out"),
        (r".*norm\d*", "norm"),
        (r".*/modulation", "modulation"),
        (r".*/(increment|skip|res_self|res_cross)", r"\1"),
        (r"(?:down|up)\d+_conv|enc_\d+x\d+_(?:down/out|joined)|dec_\d+x\d+_up/out", "sampler"),
        (r".*_transformer\d+/block\d+/out|(?:blocks|dual|single)_\d+/(?:image/)?out|last_block/image/out", "block_out"),
        (r"(?:encode_in|encode_out|decode)_\d+/dit/out", "block_out"),
        (r".*_transformer\d+/out", "vit_out"),
        (r".*/res|[^/]*block\d+/out|dec_\d+x\d+_in\d/out", "res_out"),
    ]
]
STAGE_PATTERNS = [
    (re.compile(pattern), stage)
    for pattern, stage in [
        (r"(in|embedded)$", "in"),
        (r"out$", "out"),
        (r"mid|dec_\d+x\d+_in\d", "mid"),
        (r"down|enc_", "down"),
        (r"up|dec_", "up"),
        (r"blocks_|dual_|single_|last_block|encode_|decode_", "blocks"),
    ]
]
INTER_MODULE = (
    "res_out",
    "vit_out",
    "sampler",
    "block_out",
)  # earlier work selects from these; block_out in transformers


class Tap(NamedTuple):
    """One activation. `grid` is its height and width, None if it is not spatial (text, attention maps)."""

    name: str
    kind: str
    stage: str
    shape: tuple[int, ...]  # in the network: [b h w c], [b n c], or [b heads n m] of a map
    dtype: DTypeLike
    grid: tuple[int, int] | None
    order: int  # of execution
    flops: int  # of the matrix products and convolutions before it, for the whole batch

    @property
    def channels(self) -> int:
        return self.shape[-1]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


Catalog = dict[str, Tap]


def catalog(model: nn.Module, shape: Sequence[int] | AnyArray, cond: Cond = None) -> Catalog:
    """Every activation of the model by name, in order of execution; nothing is computed.

    Args:
        model: a network.
        shape: of the images [b h w c], or such an array.
        cond: the condition: arrays or shapes (`jax.ShapeDtypeStruct`).

    Returns:
        Name -> `Tap`: shape, kind, stage, grid, order and FLOPs to reach it.
    """
    x = jax.ShapeDtypeStruct(tuple(getattr(shape, "shape", shape)), jnp.float32)
    if len(x.shape) != 4:
        raise ValueError(f"a catalogue is made for images of shape [b, h, w, c], got {x.shape}")
    label = jax.ShapeDtypeStruct(x.shape[:1], jnp.float32)
    names: list[str] = []

    def run(x: Array, label: Array, cond: Cond) -> list[Array]:  # initialises too, to trace once
        state = taps.unrolled(model).init(jax.random.key(0), x, label, cond, mutable=["params", "intermediates"])
        found = taps.named(state.get("intermediates", {}))
        found |= attention_maps.aggregated(found, x.shape)
        names.extend(found)
        return list(found.values())

    program, shapes = jax.make_jaxpr(run, return_shape=True)(x, label, cond)
    if not names:
        raise ValueError(f"{type(model).__name__} has no activations; add taps.tap(self, name, x) to it")
    rows = zip(names, shapes, flops.to_reach(program), strict=True)
    return {name: describe(name, s, x.shape, order, price) for order, (name, s, price) in enumerate(rows)}


def _kind(name: str) -> str:
    for pattern, template in KIND_PATTERNS:
        found = pattern.fullmatch(name)
        if found:
            return found.expand(template)
    return "other"


def describe(
    name: str, array: Array | jax.ShapeDtypeStruct, image: tuple[int, ...], order: int = 0, flops: int = 0
) -> Tap:
    """The tap of an activation of this shape in a network that was given images of shape [b h w c]."""
    kind = _kind(name)
    stage = next((stage for pattern, stage in STAGE_PATTERNS if pattern.match(name)), "other")
    grid = None if not_dense(kind) else taps.grid_of(tuple(array.shape), image)
    return Tap(name, kind, stage, tuple(array.shape), array.dtype, grid, order, flops)


def not_dense(kind: str) -> bool:
    """Whether activations of this kind are not spatial: attention maps, text, and the modulation of a block."""
    return kind.endswith("_map") or kind.startswith("text_") or kind in ("cross_k", "cross_v", "modulation")


# ------------------------------------------------------------------------------------------ running a network


def activations(
    apply: nn.Module | Callable[..., Any], params: Params, x: Array, label: Array, cond: Cond = None
) -> tuple[Array, dict[str, Array]]:
    """`taps.record`, with the aggregated attention maps."""
    out, found = taps.record(apply, params, x, label, cond)
    return out, found | attention_maps.aggregated(found, x.shape)
