"""DiT checkpoints under the names of the official release, and SiT (Ma et al. 2024), DiT trained by flow matching."""

from __future__ import annotations

import numpy as np

from jaxdiff.conventions import DDPM, Flow
from jaxdiff.models import MDT, DiT, dit
from jaxdiff.models.embeddings import sincos_positions
from jaxdiff.trees import Params
from jaxdiff.weights import names
from jaxdiff.weights.names import Arrays, Entry, Fields, Path, dense_entries, shape_of


def infer(arrays: Arrays) -> Fields:
    """The fields of the DiT these arrays belong to; heads are known only for the published widths."""
    fields = outer_fields("dit", arrays)
    heads = {size["width"]: size["heads"] for size in dit.SIZES.values()}
    return {
        **fields,
        "depth": len({name.split(".")[1] for name in arrays if name.startswith("blocks.")}),
        "heads": heads.get(fields["width"]),
        "mlp_ratio": shape_of("dit", arrays, "blocks.0.mlp.fc1.weight")[0] / fields["width"],
        "grid": round(arrays["pos_embed"].shape[1] ** 0.5) if "pos_embed" in arrays else 0,
    }


def outer_fields(kind: str, arrays: Arrays) -> Fields:
    """The fields of a DiT or MDT inferred from the arrays outside its blocks."""
    width, channels, patch, _ = shape_of(kind, arrays, "x_embedder.proj.weight")
    return {
        "channels": channels,
        "patch": patch,
        "width": width,
        "num_classes": shape_of(kind, arrays, "y_embedder.embedding_table.weight")[0] - 1,
        "learn_variance": shape_of(kind, arrays, "final_layer.linear.weight")[0] == 2 * channels * patch**2,
    }


def entries(model: DiT, abstract: Params) -> list[Entry]:
    table = outer_entries(model)
    for i in range(model.depth):
        table += block_entries(f"blocks.{i}", (f"blocks_{i}",), model.heads)
    return table


def outer_entries(model: DiT | MDT) -> list[Entry]:
    """Entries of a DiT or MDT outside its blocks."""
    return [
        *dense_entries("x_embedder.proj", ("patches",), names.patch_conv(model.patch, model.channels)),
        *dense_entries("t_embedder.mlp.0", ("time", "in")),
        *dense_entries("t_embedder.mlp.2", ("time", "out")),
        Entry(("y_embedder.embedding_table.weight",), ("label", "embedding"), names.as_is),
        *dense_entries("final_layer.adaLN_modulation.1", ("final", "modulation", "dense")),
        *dense_entries("final_layer.linear", ("final", "out")),
    ]


def block_entries(public: str, ours: Path, heads: int) -> list[Entry]:
    return [
        *dense_entries(
            f"{public}.attn.qkv", (*ours, "attention", "qkv"), names.qkv_kernel(heads), names.qkv_bias(heads)
        ),
        *dense_entries(f"{public}.attn.proj", (*ours, "attention", "out"), names.out_kernel(heads)),
        *dense_entries(f"{public}.mlp.fc1", (*ours, "mlp", "in")),
        *dense_entries(f"{public}.mlp.fc2", (*ours, "mlp", "out")),
        *dense_entries(f"{public}.adaLN_modulation.1", (*ours, "modulation", "dense")),
    ]


def constants(model: DiT) -> dict[str, np.ndarray]:
    if not model.grid:
        return {}
    return {"pos_embed": sincos_positions(model.grid, model.grid, model.width).reshape(1, -1, model.width)}


KIND = names.Kind(
    model=DiT,
    infer=infer,
    entries=entries,
    conventions=(DDPM("linear"),),
    constants=constants,
)
SIT = KIND._replace(conventions=(Flow(time_scale=1.0, to_data=True),))
