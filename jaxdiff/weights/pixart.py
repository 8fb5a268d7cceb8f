"""PixArt transformers under the names of the diffusers library, or read from those of the official release."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from flax.traverse_util import flatten_dict

from jaxdiff.conventions import DDPM
from jaxdiff.models import PixArt, pixart
from jaxdiff.trees import Params
from jaxdiff.weights import names
from jaxdiff.weights.names import Arrays, Entry, Fields, Layout, Path, shape_of


class Names(NamedTuple):
    """Our layers -> the public layers they consist of, outside and inside of blocks; and the name of blocks."""

    outer: dict[str, str]
    inner: dict[str, str]
    blocks: str


DIFFUSERS = Names(
    outer={
        "patches": "pos_embed.proj",
        "time/in": "adaln_single.emb.timestep_embedder.linear_1",
        "time/out": "adaln_single.emb.timestep_embedder.linear_2",
        "original_size/in": "adaln_single.emb.resolution_embedder.linear_1",
        "original_size/out": "adaln_single.emb.resolution_embedder.linear_2",
        "aspect/in": "adaln_single.emb.aspect_ratio_embedder.linear_1",
        "aspect/out": "adaln_single.emb.aspect_ratio_embedder.linear_2",
        "modulation/dense": "adaln_single.linear",
        "text_mlp/in": "caption_projection.linear_1",
        "text_mlp/out": "caption_projection.linear_2",
        "null_text": "caption_projection.y_embedding",
        "final/table": "scale_shift_table",
        "final/out": "proj_out",
    },
    inner={
        "table": "scale_shift_table",
        "attention/qkv": "attn1.to_q attn1.to_k attn1.to_v",
        "attention/out": "attn1.to_out.0",
        "cross_attention/q": "attn2.to_q",
        "cross_attention/kv": "attn2.to_k attn2.to_v",
        "cross_attention/out": "attn2.to_out.0",
        "mlp/in": "ff.net.0.proj",
        "mlp/out": "ff.net.2",
    },
    blocks="transformer_blocks",
)
OFFICIAL = Names(
    outer={
        "patches": "x_embedder.proj",
        "time/in": "t_embedder.mlp.0",
        "time/out": "t_embedder.mlp.2",
        "original_size/in": "csize_embedder.mlp.0",
        "original_size/out": "csize_embedder.mlp.2",
        "aspect/in": "ar_embedder.mlp.0",
        "aspect/out": "ar_embedder.mlp.2",
        "modulation/dense": "t_block.1",
        "text_mlp/in": "y_embedder.y_proj.fc1",
        "text_mlp/out": "y_embedder.y_proj.fc2",
        "null_text": "y_embedder.y_embedding",
        "final/table": "final_layer.scale_shift_table",
        "final/out": "final_layer.linear",
    },
    inner={
        "table": "scale_shift_table",
        "attention/qkv": "attn.qkv",
        "attention/out": "attn.proj",
        "cross_attention/q": "cross_attn.q_linear",
        "cross_attention/kv": "cross_attn.kv_linear",
        "cross_attention/out": "cross_attn.proj",
        "mlp/in": "mlp.fc1",
        "mlp/out": "mlp.fc2",
    },
    blocks="blocks",
)


def infer(public: Names, arrays: Arrays) -> Fields:
    """The fields of the PixArt these arrays belong to.

    Heads are known only for the published widths. Positions are not stored: a network with size embedders is assumed
    to be the 1024-pixel one, with grid 32; others use token indices.
    """
    outer = public.outer
    width, channels, patch, _ = shape_of("pixart", arrays, f"{outer['patches']}.weight")
    heads = {size["width"]: size["heads"] for size in pixart.SIZES.values()}
    start = f"{public.blocks}."
    null = arrays.get(outer["null_text"])
    sized = f"{outer['aspect/in']}.weight" in arrays
    return {
        "channels": channels,
        "patch": patch,
        "depth": len({name.removeprefix(start).split(".")[0] for name in arrays if name.startswith(start)}),
        "width": width,
        "heads": heads.get(width),
        "mlp_ratio": shape_of("pixart", arrays, f"{start}0.{public.inner['mlp/in']}.weight")[0] / width,
        "text_dim": shape_of("pixart", arrays, f"{outer['text_mlp/in']}.weight")[1],
        "null_tokens": 0 if null is None else null.shape[0],
        "size_embed": sized,
        "learn_variance": shape_of("pixart", arrays, f"{outer['final/out']}.weight")[0] == 2 * channels * patch**2,
        "grid": 32 if sized else 0,
    }


def entries(public: Names, model: PixArt, abstract: Params) -> list[Entry]:
    """The names derived from each path; the embedding of `step` has no public counterpart."""
    return [_entry(public, model, path) for path in flatten_dict(abstract) if path[0] != "step"]


def _entry(public: Names, model: PixArt, path: Path) -> Entry:
    leaf = path[-1]
    suffix = {"kernel": ".weight", "bias": ".bias"}.get(leaf, "")
    layer = path[:-1] if suffix else path
    stem, table = "", public.outer
    if path[0].startswith("blocks_"):
        stem, table, layer = f"{public.blocks}.{path[0].removeprefix('blocks_')}.", public.inner, layer[1:]
    parts = [f"{stem}{part}{suffix}" for part in table["/".join(layer)].split()]
    return Entry(tuple(parts), path, _layout(model, layer, leaf, len(parts)))


def _layout(model: PixArt, layer: Path, leaf: str, arrays: int) -> Layout:
    kernel, heads = leaf == "kernel", model.heads
    if layer == ("patches",) and kernel:
        return names.patch_conv(model.patch, model.channels)
    if layer[-1] in ("qkv", "kv"):
        parts = len(layer[-1])  # letters: q, k, v
        fused = names.qkv_kernel(heads, parts) if kernel else names.qkv_bias(heads, parts)
        return names.split_rows(fused, arrays) if arrays > 1 else fused
    if layer[-1] == "q":
        return names.query_kernel(heads) if kernel else names.query_bias(heads)
    if layer[0].endswith("attention") and kernel:
        return names.out_kernel(heads)
    return names.dense if kernel else names.as_is


def _named(arrays: Arrays) -> names.Kind:
    """The kind whose names these arrays have."""
    return RELEASED if f"{OFFICIAL.outer['text_mlp/in']}.weight" in arrays else KIND


KIND = names.Kind(
    model=PixArt,
    infer=partial(infer, DIFFUSERS),
    entries=partial(entries, DIFFUSERS),
    conventions=(DDPM("linear"),),
    named=_named,
)
RELEASED = KIND._replace(
    infer=partial(infer, OFFICIAL),
    entries=partial(entries, OFFICIAL),
    ignored=lambda name: name == "pos_embed",  # sines and cosines, which the model computes
)
