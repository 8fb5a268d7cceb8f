"""How well images fit their captions: the CLIP score (Hessel et al. 2021) from public weights.

    score = 100 max(cos(image vector, text vector), 0)

    score = scorer("clip.safetensors", "tokenizer.json")
    score(images, captions)

Numbers of different CLIP networks do not compare, so name yours: ViT-L/14 is the usual one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxdiff import data, weights
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


def scorer(source: Any, tokenizer: Any, batch_size: int = 64, **fields: Any) -> Callable[[Any, Sequence[str]], float]:
    """`score(images, captions)`, the mean over pairs, by both halves of one checkpoint and the tokenizer of its text.

    `fields` say what names and shapes of the arrays do not, as for `weights.load`.
    """
    halves: Any = [weights.load(source, kind, **fields) for kind in ("clip_vision", "clip_text")]
    (see, eyes), (read, head) = halves
    tokenize = data.tokenizer(tokenizer, read.length)

    @jax.jit
    def measure(eyes: Any, head: Any, images: Any, ids: Any) -> Any:
        image = see.apply({"params": eyes}, preprocess(images, see.side))
        return clip_score(image, read.apply({"params": head}, ids)["pooled"])

    def score(images: Any, captions: Sequence[str]) -> float:
        if len(images) != len(captions) or not len(images):
            raise ValueError(f"every image needs its caption, got {len(images)} images and {len(captions)} captions")
        ids, _ = tokenize(captions)
        starts = range(0, len(images), batch_size)
        parts = [measure(eyes, head, images[i : i + batch_size], ids[i : i + batch_size]) for i in starts]
        return float(np.concatenate(parts).mean())

    return score
