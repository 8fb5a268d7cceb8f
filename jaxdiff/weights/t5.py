"""The encoder of T5 version 1.1 under the names of the transformers library; a decoder is ignored."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
import numpy as np

from jaxdiff.models import T5Encoder
from jaxdiff.trees import Params
from jaxdiff.weights import names
from jaxdiff.weights.names import Arrays, Entry, Fields, Layout, count_of, shape_of

FIRST = "encoder.block.0.layer"


def infer(arrays: Arrays) -> Fields:
    """The fields of the T5Encoder these arrays belong to; the maximum relative distance is assumed to be 128."""
    if f"{FIRST}.1.DenseReluDense.wi.weight" in arrays:
        raise names.WeightsError("these arrays have one wi per block, as in T5 1.0; kind 't5' reads version 1.1")
    shape = partial(shape_of, "t5", arrays)
    vocabulary, width = shape("shared.weight")
    buckets, heads = shape(f"{FIRST}.0.SelfAttention.relative_attention_bias.weight")
    return {
        "vocabulary": vocabulary,
        "width": width,
        "depth": count_of(arrays, "encoder.block"),
        "heads": heads,
        "head_width": shape(f"{FIRST}.0.SelfAttention.q.weight")[0] // heads,
        "mlp_width": shape(f"{FIRST}.1.DenseReluDense.wi_0.weight")[0],
        "buckets": buckets,
    }


def entries(model: T5Encoder, abstract: Params) -> list[Entry]:
    table = [
        Entry(("shared.weight",), ("tokens", "embedding"), names.as_is),
        Entry((f"{FIRST}.0.SelfAttention.relative_attention_bias.weight",), ("distances",), names.as_is),
        Entry(("encoder.final_layer_norm.weight",), ("out_norm", "scale"), names.as_is),
    ]
    qkv = names.split_three(names.qkv_kernel(model.heads))
    for i in range(model.depth):
        attention, mlp = (f"encoder.block.{i}.layer.{part}" for part in range(2))
        public = tuple(f"{attention}.SelfAttention.{part}.weight" for part in "qkv")
        gated = tuple(f"{mlp}.DenseReluDense.wi_{part}.weight" for part in range(2))
        ours = f"blocks_{i}"
        table += [
            Entry(public, (ours, "attention", "qkv", "kernel"), qkv),
            Entry(
                (f"{attention}.SelfAttention.o.weight",),
                (ours, "attention", "out", "kernel"),
                names.out_kernel(model.heads),
            ),
            Entry(gated, (ours, "mlp", "in", "kernel"), GATED),
            Entry((f"{mlp}.DenseReluDense.wo.weight",), (ours, "mlp", "out", "kernel"), names.dense),
            Entry((f"{attention}.layer_norm.weight",), (ours, "norm0", "scale"), names.as_is),
            Entry((f"{mlp}.layer_norm.weight",), (ours, "norm1", "scale"), names.as_is),
        ]
    return table


# gates [m, d] and values [m, d] <-> [d, 2, m]
GATED = Layout(lambda *parts: np.stack([w.T for w in parts], axis=1), lambda k: (k[:, 0].T, k[:, 1].T))


def _ignored(name: str) -> bool:
    """The duplicate of the token table, and the decoder."""
    return name == "encoder.embed_tokens.weight" or name.startswith(("decoder.", "lm_head."))


KIND = names.Kind(
    model=T5Encoder,
    infer=infer,
    entries=entries,
    ignored=_ignored,
    example=lambda model: (jnp.zeros((1, 1), jnp.int32),),
)
