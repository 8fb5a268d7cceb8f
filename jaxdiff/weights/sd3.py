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
        "dual": _dual(arrays),
        "position_table": round(positions**0.5),
    }


def _dual(arrays: Arrays) -> int:
    """The number of blocks with dual attention (SD3.5 medium), which must be the first ones."""
    blocks = sorted({int(name.split(".")[1]) for name in arrays if ".attn2." in name})
    if blocks != list(range(len(blocks))):
        raise names.WeightsError(f"blocks with dual attention must be the first ones, these are blocks {blocks}")
    return len(blocks)


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
    for i in range(model.depth):
        dual, last = i < model.dual, i == model.depth - 1
        ours = f"dual_{i}" if dual else f"blocks_{i - model.dual}"
        if last:
            ours = "last_block"
        table += block_entries(
            model.heads, f"transformer_blocks.{i}", ours, qk_norm=model.qk_norm, dual=dual, last=last
        )
    return table


def block_entries(
    heads: int, public: str, ours: str, *, qk_norm: bool = True, dual: bool = False, last: bool = False
) -> list[Entry]:
    """A block of two streams, of SD3 or FLUX; only the last block stores the text's modulation as (scale, shift)."""
    attn, image, text = f"{public}.attn", (ours, "image"), (ours, "text")
    table = _stream(heads, attn, image, ("to_q", "to_k", "to_v"), ("norm_q", "norm_k"), qk_norm)
    added = ("add_q_proj", "add_k_proj", "add_v_proj")
    table += _stream(heads, attn, text, added, ("norm_added_q", "norm_added_k"), qk_norm)
    if dual:
        alone = (ours, "alone")
        table += _stream(heads, f"{public}.attn2", alone, ("to_q", "to_k", "to_v"), ("norm_q", "norm_k"), qk_norm)
        table += dense_entries(f"{public}.attn2.to_out.0", (ours, "alone_out"), names.out_kernel(heads))
    swap = names.swapped_halves if last else lambda layout: layout
    table += dense_entries(f"{public}.norm1.linear", (ours, "image_modulation", "dense"))
    table += dense_entries(
        f"{public}.norm1_context.linear", (ours, "text_modulation", "dense"), swap(names.dense), swap(names.as_is)
    )
    updated = [("image", "attn.to_out.0", "ff")]
    if not last:
        updated.append(("text", "attn.to_add_out", "ff_context"))
    for stream, out, mlp in updated:
        table += dense_entries(f"{public}.{out}", (ours, f"{stream}_out"), names.out_kernel(heads))
        table += dense_entries(f"{public}.{mlp}.net.0.proj", (ours, f"{stream}_mlp", "in"))
        table += dense_entries(f"{public}.{mlp}.net.2", (ours, f"{stream}_mlp", "out"))
    return table


def _stream(
    heads: int, attn: str, ours: tuple[str, str], qkv: tuple[str, ...], norms: tuple[str, str], qk_norm: bool
) -> list[Entry]:
    """Queries, keys, values and their norms."""
    block, stream = ours
    table = names.qkv_entries(heads, attn, qkv, (block, f"{stream}_qkv"))
    if qk_norm:
        table += [
            Entry((f"{attn}.{norm}.weight",), (block, f"{stream}_{part}_norm", "scale"), names.as_is)
            for part, norm in zip("qk", norms, strict=True)
        ]
    return table


KIND = names.Kind(
    model=MMDiT,
    infer=infer,
    entries=entries,
    conventions=(Flow(),),
)
