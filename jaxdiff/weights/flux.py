"""FLUX.1 transformers under the names of the diffusers library, or read from those of the original release."""

from __future__ import annotations

import numpy as np

from jaxdiff.conventions import Flow
from jaxdiff.models import Flux
from jaxdiff.trees import Params
from jaxdiff.weights import names, sd3
from jaxdiff.weights.names import Arrays, Entry, Fields, Layout, dense_entries, shape_of

PATCH = 2
AXES = {128: (16, 56, 56)}  # by the width of a head
# names of the original release -> those of diffusers; "qkv" and "linear1" hold several arrays
ORIGINAL = {
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "time_in.in_layer": "time_text_embed.timestep_embedder.linear_1",
    "time_in.out_layer": "time_text_embed.timestep_embedder.linear_2",
    "guidance_in.in_layer": "time_text_embed.guidance_embedder.linear_1",
    "guidance_in.out_layer": "time_text_embed.guidance_embedder.linear_2",
    "vector_in.in_layer": "time_text_embed.text_embedder.linear_1",
    "vector_in.out_layer": "time_text_embed.text_embedder.linear_2",
    "final_layer.linear": "proj_out",
    "final_layer.adaLN_modulation.1": "norm_out.linear",
}
ORIGINAL_DOUBLE = {
    "img_mod.lin": "norm1.linear",
    "txt_mod.lin": "norm1_context.linear",
    "img_attn.qkv": "attn.to_q attn.to_k attn.to_v",
    "txt_attn.qkv": "attn.add_q_proj attn.add_k_proj attn.add_v_proj",
    "img_attn.norm.query_norm": "attn.norm_q",
    "img_attn.norm.key_norm": "attn.norm_k",
    "txt_attn.norm.query_norm": "attn.norm_added_q",
    "txt_attn.norm.key_norm": "attn.norm_added_k",
    "img_attn.proj": "attn.to_out.0",
    "txt_attn.proj": "attn.to_add_out",
    "img_mlp.0": "ff.net.0.proj",
    "img_mlp.2": "ff.net.2",
    "txt_mlp.0": "ff_context.net.0.proj",
    "txt_mlp.2": "ff_context.net.2",
}
ORIGINAL_SINGLE = {
    "modulation.lin": "norm.linear",
    "linear1": "attn.to_q attn.to_k attn.to_v proj_mlp",
    "linear2": "proj_out",
    "norm.query_norm": "attn.norm_q",
    "norm.key_norm": "attn.norm_k",
}
BLOCKS = {
    "double_blocks": ("transformer_blocks", ORIGINAL_DOUBLE),
    "single_blocks": ("single_transformer_blocks", ORIGINAL_SINGLE),
}


def infer(arrays: Arrays) -> Fields:
    """The fields of the Flux these arrays belong to; axes are known for the published width of a head only."""
    width, packed = shape_of("flux", arrays, "x_embedder.weight")
    head_width = shape_of("flux", arrays, "transformer_blocks.0.attn.norm_q.weight")[0]
    return {
        "channels": packed // PATCH**2,
        "patch": PATCH,
        "depth": names.count_of(arrays, "transformer_blocks"),
        "single_depth": names.count_of(arrays, "single_transformer_blocks"),
        "width": width,
        "heads": width // head_width,
        "mlp_ratio": shape_of("flux", arrays, "transformer_blocks.0.ff.net.0.proj.weight")[0] / width,
        "text_dim": shape_of("flux", arrays, "context_embedder.weight")[1],
        "pooled_dim": shape_of("flux", arrays, "time_text_embed.text_embedder.linear_1.weight")[1],
        "guidance_embed": any("guidance_embedder" in name for name in arrays),
        "axes": AXES.get(head_width),
    }


def entries(model: Flux, abstract: Params) -> list[Entry]:
    halves, bias_halves = names.swapped_halves(names.dense), names.swapped_halves(names.as_is)
    size = model.patch**2
    kernel_in, kernel_out, bias_out = _packed_in(size), _packed_out(size), _packed_bias(size)
    table = [
        *dense_entries("x_embedder", ("patches",), kernel_in),
        *dense_entries("context_embedder", ("text",)),
        *dense_entries("norm_out.linear", ("final", "modulation", "dense"), halves, bias_halves),
        *dense_entries("proj_out", ("final", "out"), kernel_out, bias_out),
    ]
    embedders = {"timestep_embedder": "time", "text_embedder": "pooled"}
    if model.guidance_embed:
        embedders["guidance_embedder"] = "guide"
    for public, ours in embedders.items():
        table += dense_entries(f"time_text_embed.{public}.linear_1", (ours, "in"))
        table += dense_entries(f"time_text_embed.{public}.linear_2", (ours, "out"))
    for i in range(model.depth):
        table += sd3.block_entries(model.heads, f"transformer_blocks.{i}", f"blocks_{i}")
    for i in range(model.single_depth):
        table += _single(model, f"single_transformer_blocks.{i}", f"single_{i}")
    return table


def _single(model: Flux, public: str, ours: str) -> list[Entry]:
    attn = f"{public}.attn"
    return [
        *names.qkv_entries(model.heads, attn, ("to_q", "to_k", "to_v"), (ours, "qkv")),
        Entry((f"{attn}.norm_q.weight",), (ours, "q_norm", "scale"), names.as_is),
        Entry((f"{attn}.norm_k.weight",), (ours, "k_norm", "scale"), names.as_is),
        *dense_entries(f"{public}.norm.linear", (ours, "modulation", "dense")),
        *dense_entries(f"{public}.proj_mlp", (ours, "mlp_in")),
        *dense_entries(f"{public}.proj_out", (ours, "merge")),
    ]


def _packed_in(size: int) -> Layout:
    """[out, (channel, patch)] <-> [(patch, channel), out]."""
    return Layout(
        lambda w: w.reshape(w.shape[0], -1, size).transpose(2, 1, 0).reshape(-1, w.shape[0]),
        lambda k: (k.reshape(size, -1, k.shape[1]).transpose(2, 1, 0).reshape(k.shape[1], -1),),
    )


def _packed_out(size: int) -> Layout:
    """[(channel, patch), in] <-> [in, (patch, channel)]."""
    return Layout(
        lambda w: w.reshape(-1, size, w.shape[1]).transpose(2, 1, 0).reshape(w.shape[1], -1),
        lambda k: (k.reshape(k.shape[0], size, -1).transpose(2, 1, 0).reshape(-1, k.shape[0]),),
    )


def _packed_bias(size: int) -> Layout:
    """(channel, patch) <-> (patch, channel)."""
    return Layout(
        lambda b: b.reshape(-1, size).transpose(1, 0).reshape(-1),
        lambda b: (b.reshape(size, -1).transpose(1, 0).reshape(-1),),
    )


def from_original(arrays: Arrays) -> Arrays:
    """The arrays under the names of diffusers; unchanged if they have them already."""
    if not any(name.startswith("double_blocks.") for name in arrays):
        return arrays
    width = shape_of("flux", arrays, "img_in.weight")[0]
    found: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        layer, leaf = name.rsplit(".", 1)
        stem, table = "", ORIGINAL
        first, *rest = layer.split(".", 2)
        if first in BLOCKS and len(rest) == 2:
            blocks, table = BLOCKS[first]
            stem, layer = f"{blocks}.{rest[0]}.", rest[1]
        parts = table.get(layer, layer).split()
        leaf = "weight" if leaf == "scale" else leaf
        if layer == "final_layer.adaLN_modulation.1":  # (shift, scale), in diffusers (scale, shift)
            array = np.roll(array, width, axis=0)
        rows = np.split(array, [width * (i + 1) for i in range(len(parts) - 1)])  # the MLP's are the last
        found |= {f"{stem}{part}.{leaf}": piece for part, piece in zip(parts, rows, strict=True)}
    return found


KIND = names.Kind(
    model=Flux,
    infer=infer,
    entries=entries,
    conventions=(Flow(),),
    renamed=from_original,
)
