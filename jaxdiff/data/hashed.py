"""A text encoder without weights, for tests and examples: a random vector per word, seeded by a hash.

    noise   r(name): uniform numbers of mean 0 and variance 1, the bits of a hash of the name
    word    v(w) = sum over w and its letter trigrams g of r(g) / sqrt(count)
    text    a start row, then one row per word: (v(w) + r(position)) / sqrt(2)
    pooled  sum over words and adjacent pairs of their vectors / sqrt(count), so that order matters

A word has the same vector in every prompt and process, words that share letters have similar vectors, and meaning plays
no part.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32

START = "\n"  # never a word


def hashed_text(prompts: Sequence[str], length: int, width: int, seed: int = 0) -> dict[str, np.ndarray]:
    """`text` [n length width], `text_mask` [n length] and `pooled` [n width] of the prompts.

    An empty prompt is the start token alone, so no mask is empty. With "" as the last prompt these are the tables of
    the data source `prompts`. Case is ignored, punctuation marks are words.
    """
    if isinstance(prompts, str):
        raise ValueError(f"hashed_text takes a list of prompts, got one string; pass [{prompts!r}]")
    if not len(prompts) or length < 1 or width < 1:
        raise ValueError(
            f"hashed_text needs prompts, length and width >= 1, got {len(prompts)} prompts, {length=}, {width=}"
        )
    rows = [[START, *split(text)] for text in prompts]
    counts = np.array([len(words) for words in rows])
    if counts.max(initial=0) > length:
        worst = int(counts.argmax())
        raise ValueError(
            f"{prompts[worst]!r} has {counts[worst]} tokens with the start token, more than length={length}; raise it "
            "or shorten the prompt"
        )
    places = np.stack([_noise(f"{START}{i}", width, seed) for i in range(length)])
    table = np.zeros((len(rows), length, width), np.float32)
    for row, words in zip(table, rows, strict=True):
        vectors = np.stack([_word(word, width, seed) for word in words])
        row[: len(words)] = (vectors + places[: len(words)]) / np.float32(2**0.5)
    mask = np.arange(length) < counts[:, None]
    return {"text": table, "text_mask": mask, "pooled": np.stack([_pooled(words, width, seed) for words in rows])}


def split(text: str) -> list[str]:
    """Words and punctuation marks in lower case."""
    return re.findall(r"\w+|[^\w\s]", text.lower())


def _pooled(words: list[str], width: int, seed: int) -> Float32[np.ndarray, " d"]:
    pairs = [f"{left} {right}" for left, right in itertools.pairwise(words)]
    parts = [_word(word, width, seed) for word in words[1:] or words] + [_noise(pair, width, seed) for pair in pairs]
    return np.sum(parts, axis=0) / np.float32(len(parts) ** 0.5)


@functools.lru_cache(maxsize=2**14)
def _word(word: str, width: int, seed: int) -> Float32[np.ndarray, " d"]:
    framed = f"<{word}>"
    grams = [framed, *(framed[i : i + 3] for i in range(len(framed) - 2) if len(framed) > 3)]
    return np.sum([_noise(gram, width, seed) for gram in grams], axis=0) / np.float32(len(grams) ** 0.5)


def _noise(name: str, width: int, seed: int) -> Float32[np.ndarray, " d"]:
    """Uniform of variance 1, from an extendable hash."""
    bits = np.frombuffer(hashlib.shake_128(f"{seed} {name}".encode()).digest(4 * width), "<u4")
    return ((bits / 2.0**31 - 1) * 3**0.5).astype(np.float32)
