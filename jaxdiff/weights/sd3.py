"""Stable Diffusion 3 transformers under the names of the diffusers library."""

from __future__ import annotations

from jaxdiff.conventions import Flow
from jaxdiff.models import MMDiT
from jaxdiff.trees import Params
from jaxdiff.weights import names
from jaxdiff.weights.names import Arrays, Entry, Fields, Layout, dense_entries, shape_of


def infer(arrays: Arrays) -> Fields:
    """The fields of the MMDiT these arrays belong to; without QK-norm heads are assumed to be 64 wide, as in SD3."""
    if any("joint_blocks." in name for name in arrays):
        raise names.WeightsError(
            "these are the original SD3 names; kind 'sd3' reads the diffusers layout, transformer_blocks..."
        )
    width, channels, patch, _ = shape_of("sd3", arrays, "pos_embed.proj.weight")
    norm = arrays.get("transformer_blocks.0.attn.norm_q.weight")
    head_width = 64 if norm is None else norm.shape[0]
    positions = shape_of("sd3", arrays, "pos_embed.pos_embed")[1] if "pos_embed.pos_embed" in arrays else 0
    return {
        "channels": channels,
        "patch": patch,
        "depth": len({name.split(".")[1] for name in arrays if name.startswith("transformer_blocks.")}),
        "width": width,
        "heads": None if width % head_width else width // head_width,
        "mlp_ratio": shape_of("sd3", arrays, "transformer_blocks.0.ff.net.0.proj.weight")[0] / width,
        "text_dim": shape_of("sd3", arrays, "context_embedder.weight")[1],
        "pooled_dim": shape_of("sd3", arrays, "time_text_embed.text_embedder.linear_1.weight")[1],
        "qk_norm": norm is not None,
        "position_table": round(positions**0.5),
    }


def entries(model: MMDiT, abstract: Params) -> list[Entry]:
    halves, bias_halves = names.swapped_halves(names.dense), names.swapped_halves(names.as_is)
    table = [
        *dense_entries("pos_embed.proj", ("patches",), names.patch_conv(model.patch, model.channels)),
        *dense_entries("context_embedder", ("text",)),
        *dense_entries("time_text_embed.timestep_embedder.linear_1", ("time", "in")),
        *dense_entries("time_text_embed.timestep_embedder.linear_2", ("time", "out")),
        *dense_entries("time_text_embed.text_embedder.linear_1", ("pooled", "in")),
        *dense_entries("time_text_embed.text_embedder.linear_2", ("pooled", "out")),
        *dense_entries("norm_out.linear", ("final", "modulation", "dense"), halves, bias_halves),
        *dense_entries("proj_out", ("final", "out")),
    ]
    if side := model.position_table:
        square = Layout(lambda w: w.reshape(side, side, -1), lambda p: (p.reshape(1, side**2, -1),))
        table.append(Entry(("pos_embed.pos_embed",), ("positions",), square))
    for i in range(model.depth - 1):
        table += _block(model, f"transformer_blocks.{i}", f"blocks_{i}", last=False)
    return table + _block(model, f"transformer_blocks.{model.depth - 1}", "last_block", last=True)


def _block(model: MMDiT, public: str, ours: str, last: bool) -> list[Entry]:
    """Both streams; only the last block stores the text's modulation as (scale, shift)."""
    table = _stream(model, public, ours, "image", ("to_q", "to_k", "to_v"), ("norm_q", "norm_k"))
    table += _stream(
        model, public, ours, "text", ("add_q_proj", "add_k_proj", "add_v_proj"), ("norm_added_q", "norm_added_k")
    )
    swap = names.swapped_halves if last else lambda layout: layout
    table += dense_entries(f"{public}.norm1.linear", (ours, "image_modulation", "dense"))
    table += dense_entries(
        f"{public}.norm1_context.linear", (ours, "text_modulation", "dense"), swap(names.dense), swap(names.as_is)
    )
    updated = [("image", "attn.to_out.0", "ff")]
    if not last:
        updated.append(("text", "attn.to_add_out", "ff_context"))
    for stream, out, mlp in updated:
        table += dense_entries(f"{public}.{out}", (ours, f"{stream}_out"), names.out_kernel(model.heads))
        table += dense_entries(f"{public}.{mlp}.net.0.proj", (ours, f"{stream}_mlp", "in"))
        table += dense_entries(f"{public}.{mlp}.net.2", (ours, f"{stream}_mlp", "out"))
    return table


def _stream(
    model: MMDiT, public: str, ours: str, stream: str, qkv: tuple[str, ...], norms: tuple[str, str]
) -> list[Entry]:
    """Queries, keys, values and their norms."""
    kernel, bias = (names.split_three(layout(model.heads)) for layout in (names.qkv_kernel, names.qkv_bias))
    table = [
        Entry(tuple(f"{public}.attn.{part}.weight" for part in qkv), (ours, f"{stream}_qkv", "kernel"), kernel),
        Entry(tuple(f"{public}.attn.{part}.bias" for part in qkv), (ours, f"{stream}_qkv", "bias"), bias),
    ]
    if model.qk_norm:
        table += [
            Entry((f"{public}.attn.{norm}.weight",), (ours, f"{stream}_{part}_norm", "scale"), names.as_is)
            for part, norm in zip("qk", norms, strict=True)
        ]
    return table


KIND = names.Kind(
    model=MMDiT,
    infer=infer,
    entries=entries,
    conventions=(Flow(),),
)
