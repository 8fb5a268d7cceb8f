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
from flax.traverse_util import flatten_dict
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
        (r".*image/attention", "self_out"),
        (r".*text/(\w+)", r"text_\1"),
        (r".*text_mlp/(\w+)", r"text_mlp_\1"),
        (r".*image/([qkv])", r"self_\1"),
        (r".*mlp/inner", "inner"),
        (r".*mlp/out", "mlp_out"),
        (r".*norm\d*", "norm"),
        (r".*/modulation", "modulation"),
        (r".*/(increment|skip|res_self|res_cross)", r"\1"),
        (r"(?:down|up)\d+_conv|enc_\d+x\d+_(?:down/out|joined)|dec_\d+x\d+_up/out", "sampler"),
        (r".*_transformer\d+/block\d+/out|blocks_\d+/(?:image/)?out|last_block/image/out", "block_out"),
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
        (r"blocks_|last_block|encode_|decode_", "blocks"),
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

    `shape` is that of the images [b h w c] (or such an array), `cond` the condition: arrays or `jax.ShapeDtypeStruct`s.
    """
    x = jax.ShapeDtypeStruct(tuple(getattr(shape, "shape", shape)), jnp.float32)
    if len(x.shape) != 4:
        raise ValueError(f"a catalogue is made for images of shape [b, h, w, c], got {x.shape}")
    label = jax.ShapeDtypeStruct(x.shape[:1], jnp.float32)
    names: list[str] = []

    def run(x: Array, label: Array, cond: Cond) -> list[Array]:  # initialises too, to trace once
        state = unrolled(model).init(jax.random.key(0), x, label, cond, mutable=["params", "intermediates"])
        taps = _named(state.get("intermediates", {}), x.shape)
        names.extend(taps)
        return list(taps.values())

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
    grid = None if not_dense(kind) else grid_of(tuple(array.shape), image)
    return Tap(name, kind, stage, tuple(array.shape), array.dtype, grid, order, flops)


def not_dense(kind: str) -> bool:
    """Whether activations of this kind are not spatial: attention maps, text, and the modulation of a block."""
    return kind.endswith("_map") or kind.startswith("text_") or kind in ("cross_k", "cross_v", "modulation")


def grid_of(shape: tuple[int, ...], image: tuple[int, ...]) -> tuple[int, int] | None:
    """Height and width of an activation; tokens are in row-major order, downsampled equally in both directions."""
    if len(shape) == 4:
        return shape[1:3]
    if len(shape) != 3 or (image[1] * image[2]) % shape[1]:
        return None
    step = math.isqrt(image[1] * image[2] // shape[1])
    height, width = image[1] // step, image[2] // step
    return (height, width) if height * width == shape[1] else None


# ------------------------------------------------------------------------------------------ running a network


def unrolled(model: nn.Module) -> nn.Module:
    """The model without scan (which computes all), remat (which reorders names) and token masking."""
    plain: dict[str, Any] = {"scan": False, "remat": False, "mask_ratio": ()}
    changes = {field: value for field, value in plain.items() if getattr(model, field, value) != value}
    return model.clone(**changes) if changes else model


def activations(
    apply: nn.Module | Callable[..., Any], params: Params, x: Array, label: Array, cond: Cond = None
) -> tuple[Array, dict[str, Array]]:
    """The output and every tap of one evaluation, by name, in order of execution.

    `apply` is a model or a function called as `model.apply`. Under jit only what is returned is computed.
    """
    call = apply.apply if isinstance(apply, nn.Module) else apply
    out, state = call({"params": params}, x, label, cond, mutable=["intermediates"])
    return out, _named(state.get("intermediates", {}), x.shape)


def _named(sown: Params, image: tuple[int, ...]) -> dict[str, Array]:
    paths = {path: value for path, value in flatten_dict(sown).items() if path[-1].startswith(taps.TAP)}
    found = {"/".join((*path[:-1], path[-1].removeprefix(taps.TAP))): value for path, value in paths.items()}
    return found | attention_maps.aggregated(found, image)
