"""MDTv2 checkpoints under the names of the official release."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxdiff.conditions import METHOD
from jaxdiff.conventions import DDPM
from jaxdiff.models import MDT
from jaxdiff.models.mdt import relative_index
from jaxdiff.trees import Params
from jaxdiff.weights import dit, names
from jaxdiff.weights.names import Arrays, Entry, Fields, Layout, dense_entries, shape_of

STACKS = {"en_inblocks": "encode_in", "en_outblocks": "encode_out", "de_blocks": "decode"}
INDEX = "attn.rel_pos_bias.relative_position_index"


def infer(arrays: Arrays) -> Fields:
    """The fields of the MDT these arrays belong to; without a side block there is no masking."""
    depths = {stack: len({name.split(".")[1] for name in arrays if name.startswith(f"{stack}.")}) for stack in STACKS}
    fields = dit.outer_fields("mdt", arrays)
    table = shape_of("mdt", arrays, "en_inblocks.0.attn.rel_pos_bias.relative_position_bias_table")
    return {
        **fields,
        "depth": sum(depths.values()),
        "heads": table[1],
        "decoder": depths["de_blocks"],
        "mlp_ratio": shape_of("mdt", arrays, "en_inblocks.0.mlp.fc1.weight")[0] / fields["width"],
        "grid": round(shape_of("mdt", arrays, "pos_embed")[1] ** 0.5),
        **({} if "mask_token" in arrays else {"mask_ratio": ()}),
    }


def entries(model: MDT, abstract: Params) -> list[Entry]:
    side = model.grid
    positions = Layout(lambda w: w.reshape(side, side, -1), lambda p: (p.reshape(1, side**2, -1),))
    table = dit.outer_entries(model)
    table.append(Entry(("pos_embed",), ("positions",), positions))
    table.append(Entry(("decoder_pos_embed",), ("decoder_positions",), positions))
    if model.mask_ratio:
        table.append(Entry(("mask_token",), ("mask_token",), Layout(lambda w: w[0, 0], lambda t: (t[None, None],))))
    for public, ours in _blocks(model).items():
        table += dit.block_entries(public, (ours, "dit"), model.heads)
        bias = f"{public}.attn.rel_pos_bias.relative_position_bias_table"
        table.append(Entry((bias,), (ours, "position_bias"), names.as_is))
        if ours.startswith(("encode_out", "decode")):
            table += dense_entries(f"{public}.skip_linear", (ours, "skip"))
    return table


def _blocks(model: MDT) -> dict[str, str]:
    """Public name of each block and ours."""
    half = (model.depth - model.decoder) // 2
    depths = zip(STACKS.items(), (half, half, model.decoder), strict=True)
    blocks = {f"{public}.{i}": f"{ours}_{i}" for (public, ours), depth in depths for i in range(depth)}
    return blocks | ({"sideblocks.0": "side"} if model.mask_ratio else {})


def constants(model: MDT) -> dict[str, np.ndarray]:
    index = relative_index(model.grid, model.grid)
    return {f"{public}.{INDEX}": index for public in _blocks(model)}


def example(model: MDT) -> tuple:
    if not model.grid:
        raise ValueError(
            "an MDT is exported with the side of its token grid: model.clone(grid=...), 16 for 32x32 latents"
        )
    side = model.grid * model.patch
    cond = {name: jnp.zeros(1) for name, signal in model.signals().items() if signal.group == METHOD}
    return jnp.zeros((1, side, side, model.channels)), jnp.zeros(1), cond or None


KIND = names.Kind(
    model=MDT,
    infer=infer,
    entries=entries,
    conventions=(DDPM("linear"),),
    constants=constants,
    example=example,
)
