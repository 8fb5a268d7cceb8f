"""How well images fit their captions: the CLIP score (Hessel et al. 2021) from public weights.

    score = 100 max(cos(image vector, text vector), 0)

    model, params = weights.load("clip.safetensors", "clip_vision")
    image = model.apply({"params": params}, preprocess(images, model.side))
    model, params = weights.load("clip.safetensors", "clip_text")
    text = model.apply({"params": params}, ids)["pooled"]
    clip_score(image, text).mean()

Numbers of different CLIP networks do not compare, so name yours: ViT-L/14 is the usual one.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxdiff.evaluation.resize import as_rgb, resize

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # of RGB in [0, 1]


def preprocess(images: Any, side: int = 224, kind: str = "clean") -> Float[Array, "b {side} {side} 3"]:
    """uint8 or [-1, 1] images, square or stretched to it, resized by `kind` and scaled as in CLIP's training."""
    unit = (resize(as_rgb(images), side, kind).clip(-1, 1) + 1) / 2
    return (unit - jnp.asarray(MEAN)) / jnp.asarray(STD)


def clip_score(image: Float[Array, "b d"], text: Float[Array, "b e"]) -> Float[Array, " b"]:
    """The score of each pair of vectors, as the encoders give them."""
    if image.shape != text.shape:
        raise ValueError(
            f"a CLIP score compares vectors of one network, got {image.shape} and {text.shape}; "
            "take both halves from one file, and the text with its projection"
        )
    lengths = jnp.linalg.norm(image, axis=-1) * jnp.linalg.norm(text, axis=-1)
    return 100 * jnp.maximum((image * text).sum(-1) / lengths, 0)
