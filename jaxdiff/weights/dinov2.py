"""DINOv2's ViT-S/14, B/14 and L/14 without registers, under the names of the public checkpoints."""

from __future__ import annotations

import jax.numpy as jnp

from jaxdiff.models.dinov2 import HEAD_WIDTH, DINOv2
from jaxdiff.trees import Params
from jaxdiff.weights import names
from jaxdiff.weights.names import Arrays, Entry, Fields, Layout, count_of, dense_entries, shape_of


def infer(arrays: Arrays) -> Fields:
    """Width, depth, patch and grid of positions; heads are 64 wide in all of them."""
    if "register_tokens" in arrays:
        raise names.WeightsError("this DINOv2 has register tokens; use the checkpoint without them (no `_reg4`)")
    if any(".mlp.w12." in name for name in arrays):
        raise names.WeightsError("this is DINOv2's ViT-g, whose MLP differs; use ViT-S, B or L")
    width, _, patch, _ = shape_of("dinov2", arrays, "patch_embed.proj.weight")
    positions = shape_of("dinov2", arrays, "pos_embed")[1]
    return {
        "width": width,
        "depth": count_of(arrays, "blocks"),
        "patch": patch,
        "grid": round((positions - 1) ** 0.5),
    }


def entries(model: DINOv2, abstract: Params) -> list[Entry]:
    heads = model.width // HEAD_WIDTH
    table = [
        *dense_entries("patch_embed.proj", ("patches",), names.patch_conv(model.patch, 3)),
        Entry(("cls_token",), ("class_token",), Layout(lambda w: w[0, 0], lambda w: (w[None, None],))),
        Entry(("pos_embed",), ("positions",), Layout(lambda w: w[0], lambda w: (w[None],))),
        *_norm("norm", ("out_norm",)),
    ]
    for i in range(model.depth):
        public, ours = f"blocks.{i}", f"blocks_{i}"
        table += [
            *_norm(f"{public}.norm1", (ours, "norm0")),
            *dense_entries(
                f"{public}.attn.qkv", (ours, "attention", "qkv"), names.qkv_kernel(heads), names.qkv_bias(heads)
            ),
            *dense_entries(f"{public}.attn.proj", (ours, "attention", "out"), names.out_kernel(heads)),
            Entry((f"{public}.ls1.gamma",), (ours, "scale0"), names.as_is),
            *_norm(f"{public}.norm2", (ours, "norm1")),
            *dense_entries(f"{public}.mlp.fc1", (ours, "mlp", "in")),
            *dense_entries(f"{public}.mlp.fc2", (ours, "mlp", "out")),
            Entry((f"{public}.ls2.gamma",), (ours, "scale1"), names.as_is),
        ]
    return table


def _norm(public: str, path: names.Path) -> list[Entry]:
    return [
        Entry((f"{public}.weight",), (*path, "scale"), names.as_is),
        Entry((f"{public}.bias",), (*path, "bias"), names.as_is),
    ]


KIND = names.Kind(
    model=DINOv2,
    infer=infer,
    entries=entries,
    example=lambda model: (jnp.zeros((1, model.patch, model.patch, 3)),),
    ignored=lambda name: name == "mask_token",  # of training
)
