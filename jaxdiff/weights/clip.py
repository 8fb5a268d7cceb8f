"""Text and image encoders of CLIP under the names of the transformers library.

Each kind reads its own half of a checkpoint of both. The arrays do not determine the activation and the number of
heads: for published widths they are those of the release (OpenAI's up to 768 for text and 1024 for images, OpenCLIP's
above), for others they must be passed.
"""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp

from jaxdiff.models import CLIPText, CLIPVision
from jaxdiff.trees import Params
from jaxdiff.weights import names
from jaxdiff.weights.names import Arrays, Entry, Fields, Kind, Layout, count_of, dense_entries, shape_of

# width: (heads, activation)
TEXT = {512: (8, "quick_gelu"), 768: (12, "quick_gelu"), 1024: (16, "gelu"), 1280: (20, "gelu")}
VISION = {768: (12, "quick_gelu"), 1024: (16, "quick_gelu"), 1280: (16, "gelu"), 1664: (16, "gelu")}
OTHERS = ("text_model.", "text_projection.", "vision_model.", "visual_projection.")


def text_named(arrays: Arrays) -> Kind:
    """The kind under the names these arrays have: with `text_model.`, as in files, or without."""
    return _text_kind("" if "embeddings.token_embedding.weight" in arrays else "text_model.")


def _infer_text(prefix: str, arrays: Arrays) -> Fields:
    shape = partial(shape_of, "clip_text", arrays)
    vocabulary, width = shape(f"{prefix}embeddings.token_embedding.weight")
    heads, activation = TEXT.get(width, (None, None))
    return {
        "vocabulary": vocabulary,
        "length": shape(f"{prefix}embeddings.position_embedding.weight")[0],
        "width": width,
        "depth": count_of(arrays, f"{prefix}encoder.layers"),
        "heads": heads,
        "mlp_width": shape(f"{prefix}encoder.layers.0.mlp.fc1.weight")[0],
        "activation": activation,
        "projection": arrays["text_projection.weight"].shape[0] if "text_projection.weight" in arrays else 0,
        "eos": vocabulary - 1,
    }


def _infer_vision(arrays: Arrays) -> Fields:
    shape = partial(shape_of, "clip_vision", arrays)
    width, _, patch, _ = shape("vision_model.embeddings.patch_embedding.weight")
    heads, activation = VISION.get(width, (None, None))
    return {
        "side": round((shape("vision_model.embeddings.position_embedding.weight")[0] - 1) ** 0.5) * patch,
        "patch": patch,
        "width": width,
        "depth": count_of(arrays, "vision_model.encoder.layers"),
        "heads": heads,
        "mlp_width": shape("vision_model.encoder.layers.0.mlp.fc1.weight")[0],
        "activation": activation,
        "projection": shape("visual_projection.weight")[0],
    }


def _text_entries(prefix: str, model: CLIPText, abstract: Params) -> list[Entry]:
    projection = [Entry(("text_projection.weight",), ("projection", "kernel"), names.dense)]
    return [
        Entry((f"{prefix}embeddings.token_embedding.weight",), ("tokens", "embedding"), names.as_is),
        Entry((f"{prefix}embeddings.position_embedding.weight",), ("positions",), names.as_is),
        *_norm(f"{prefix}final_layer_norm", ("out_norm",)),
        *projection * bool(model.projection),
        *_blocks(prefix, model),
    ]


def _vision_entries(model: CLIPVision, abstract: Params) -> list[Entry]:
    embeddings, patches = "vision_model.embeddings.", names.patch_conv(model.patch, 3)
    return [
        Entry((f"{embeddings}patch_embedding.weight",), ("patches", "kernel"), patches),
        Entry((f"{embeddings}class_embedding",), ("class_token",), names.as_is),
        Entry((f"{embeddings}position_embedding.weight",), ("positions",), names.as_is),
        *_norm("vision_model.pre_layrnorm", ("in_norm",)),  # sic
        *_norm("vision_model.post_layernorm", ("out_norm",)),
        Entry(("visual_projection.weight",), ("projection", "kernel"), names.dense),
        *_blocks("vision_model.", model),
    ]


def _blocks(prefix: str, model: CLIPText | CLIPVision) -> list[Entry]:
    table = []
    for i in range(model.depth):
        public, ours = f"{prefix}encoder.layers.{i}", f"blocks_{i}"
        table += [
            _qkv(public, ours, "weight", "kernel", names.qkv_kernel(model.heads)),
            _qkv(public, ours, "bias", "bias", names.qkv_bias(model.heads)),
            *dense_entries(f"{public}.self_attn.out_proj", (ours, "attention", "out"), names.out_kernel(model.heads)),
            *dense_entries(f"{public}.mlp.fc1", (ours, "mlp", "in")),
            *dense_entries(f"{public}.mlp.fc2", (ours, "mlp", "out")),
            *_norm(f"{public}.layer_norm1", (ours, "norm0")),
            *_norm(f"{public}.layer_norm2", (ours, "norm1")),
        ]
    return table


def _qkv(public: str, ours: str, suffix: str, leaf: str, layout: Layout) -> Entry:
    parts = tuple(f"{public}.self_attn.{part}_proj.{suffix}" for part in "qkv")
    return Entry(parts, (ours, "attention", "qkv", leaf), names.split_three(layout))


def _norm(public: str, path: names.Path) -> list[Entry]:
    return [
        Entry((f"{public}.weight",), (*path, "scale"), names.as_is),
        Entry((f"{public}.bias",), (*path, "bias"), names.as_is),
    ]


def _ignored(own: tuple[str, str], name: str) -> bool:
    """The other half, the scale of logits, and the position indices that early files store."""
    other = name.startswith(OTHERS) and not name.startswith(own)
    return other or name == "logit_scale" or name.endswith("embeddings.position_ids")


def _text_kind(prefix: str) -> Kind:
    return Kind(
        model=CLIPText,
        infer=partial(_infer_text, prefix),
        entries=partial(_text_entries, prefix),
        ignored=partial(_ignored, OTHERS[:2]),
        example=lambda model: (jnp.zeros((1, 1), jnp.int32),),
        named=text_named,
    )


CLIP_TEXT = _text_kind("text_model.")
CLIP_VISION = Kind(
    model=CLIPVision,
    infer=_infer_vision,
    entries=_vision_entries,
    ignored=partial(_ignored, OTHERS[2:]),
    example=lambda model: (jnp.zeros((1, model.side, model.side, 3)),),
)
