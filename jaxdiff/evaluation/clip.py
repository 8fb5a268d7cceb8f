"""How well images match their captions: CLIP scores from public weights, named by their formula.

    100cos    100 max(cos(image, text), 0)                                 what most papers on text to image report
    hessel    2.5 max(cos(image, text), 0), captions after "A photo depicts"           CLIP-S (Hessel et al. 2021)

    score = scorer("clip.safetensors", "tokenizer.json", "100cos")
    score(images, captions)

Scores of different CLIP networks are not comparable, so report yours: ViT-L/14 is the usual one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxdiff import data, weights
from jaxdiff.errors import pick
from jaxdiff.models.clip import CLIPText, CLIPVision, preprocess
from jaxdiff.trees import AnyArray, Params
from jaxdiff.weights.files import Source


class Formula(NamedTuple):
    """A score: its factor on the cosine, and what is put before captions."""

    factor: float
    prefix: str = ""


FORMULAS = {"100cos": Formula(100.0), "hessel": Formula(2.5, "A photo depicts ")}


def positive_cosine(image: Float[Array, "b d"], text: Float[Array, "b e"]) -> Float[Array, " b"]:
    """max(cos, 0) of each pair of encoder outputs."""
    if image.shape != text.shape:
        raise ValueError(
            f"a CLIP score compares vectors of one network, got {image.shape} and {text.shape}; "
            "load both encoders from one file, the text encoder with its projection"
        )
    lengths = jnp.linalg.norm(image, axis=-1) * jnp.linalg.norm(text, axis=-1)
    return jnp.maximum((image * text).sum(-1) / lengths, 0)


def scorer(
    source: Source, tokenizer: str | os.PathLike, formula: str = "100cos", batch_size: int = 64, **fields: Any
) -> Callable[[AnyArray, Sequence[str]], float]:
    """`score(images, captions)`, the mean over pairs, with both encoders of one checkpoint and its tokenizer.

    `fields` set what the arrays do not determine, as for `weights.load`.
    """
    factor, prefix = pick(FORMULAS, formula, "CLIP score")
    vision, vision_params = weights.load(source, "clip_vision", **fields)
    text, text_params = weights.load(source, "clip_text", **fields)
    assert isinstance(vision, CLIPVision) and isinstance(text, CLIPText)
    tokenize = data.tokenizer(tokenizer, text.length)

    @jax.jit
    def measure(vision_params: Params, text_params: Params, images: Array, ids: Array) -> Array:
        image: Any = vision.apply({"params": vision_params}, preprocess(images, vision.side))
        caption: Any = text.apply({"params": text_params}, ids)
        return factor * positive_cosine(image, caption["pooled"])

    def score(images: AnyArray, captions: Sequence[str]) -> float:
        if len(images) != len(captions) or not len(images):
            raise ValueError(f"every image needs a caption, got {len(images)} images and {len(captions)} captions")
        ids, _ = tokenize([prefix + caption for caption in captions])
        starts = range(0, len(images), batch_size)
        parts = [
            measure(vision_params, text_params, images[i : i + batch_size], ids[i : i + batch_size]) for i in starts
        ]
        return float(np.concatenate(parts).mean())

    return score
