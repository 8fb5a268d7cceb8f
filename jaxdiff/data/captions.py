"""Captions as conditions: tables of text embeddings with one row a caption and a last one for no text."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple

import numpy as np

from jaxdiff.data.examples import Fetch, widen
from jaxdiff.data.hashed import hashed_text
from jaxdiff.data.prompts import read_tables
from jaxdiff.errors import nearest, pick

Rows = dict[str, np.ndarray]  # text, text_mask and pooled of some texts


class Texts(NamedTuple):
    """Embeddings of captions by number, the last being that of no text, and of prompts."""

    rows: Callable[[np.ndarray], Rows]
    encode: Callable[[Sequence[str]], Rows]


def mean_of_tokens(rows: Rows) -> Rows:
    """With the mean over the tokens that are text as what is pooled."""
    text = rows["text"]
    mask = np.asarray(rows.get("text_mask", np.ones(text.shape[:2])), np.float32)
    pooled = np.einsum("nl,nld->nd", mask, text) / np.maximum(mask.sum(1, keepdims=True), 1)
    return {**rows, "pooled": pooled}


POOLINGS: dict[str, Callable[[Rows], Rows]] = {"": lambda rows: rows, "mean": mean_of_tokens}


def embed(captions: Sequence[str], how: Any, pooling: str = "") -> Texts:
    """By `how` = (length, width): hashed words; or by a folder of .npy files, as the source `prompts` reads them.

    pooling "mean" takes the mean of a text's tokens for `pooled`, "" what comes with the embeddings.
    """
    pool = pick(POOLINGS, pooling, "pooling of texts")
    if not captions:
        raise ValueError(f"caption_text={how!r} needs a data source with captions; drop it, or add captions")
    if isinstance(how, (str, os.PathLike)):
        return _stored(captions, how, pool)
    if len(how) != 2:
        raise ValueError(f"caption_text is (length, width) for hashed words, or a folder of embeddings, got {how!r}")

    def encode(prompts: Sequence[str]) -> Rows:
        return pool(hashed_text(prompts, *how))

    tables = encode([*captions, ""])
    return Texts(lambda where: {name: table[where] for name, table in tables.items()}, encode)


def _stored(captions: Sequence[str], folder: str | os.PathLike, pool: Callable[[Rows], Rows]) -> Texts:
    tables = read_tables(folder)
    if len(tables["text"]) != len(captions) + 1:
        raise ValueError(
            f"{folder} has {len(tables['text'])} rows for {len(captions)} captions; store one row a caption and a last "
            "one for the empty prompt"
        )
    number = {**{caption: i for i, caption in enumerate(captions)}, "": len(captions)}

    def rows(where: np.ndarray) -> Rows:
        return pool({name: widen(np.asarray(table[where])) for name, table in tables.items()})

    def encode(prompts: Sequence[str]) -> Rows:
        for prompt in prompts:
            if prompt not in number:
                near = nearest(prompt, number)
                raise ValueError(f"{folder} holds embeddings of the data's captions only, not {prompt!r}{near}")
        return rows(np.asarray([number[prompt] for prompt in prompts]))

    return Texts(rows, encode)


def with_text(fetch: Fetch, texts: Texts) -> Fetch:
    """Batches with the embeddings of their captions."""

    def fetch_all(positions: range, executor: Executor | None) -> dict[str, Any]:
        batch = fetch(positions, executor)
        return {**batch, **texts.rows(batch["caption_id"])}

    return fetch_all
