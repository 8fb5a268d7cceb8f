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
from jaxdiff.errors import nearest


class Texts(NamedTuple):
    """`tables` by name (text, text_mask, pooled), and `encode(prompts)` to rows of the same."""

    tables: dict[str, np.ndarray]
    encode: Callable[[Sequence[str]], dict[str, np.ndarray]]


def embed(captions: Sequence[str], how: Any) -> Texts:
    """By `how` = (length, width): hashed words; or by a folder of .npy files, as the source `prompts` reads them."""
    if not captions:
        raise ValueError(f"caption_text={how!r} needs a data source with captions; drop it, or add captions")
    if isinstance(how, (str, os.PathLike)):
        return _stored(captions, how)
    if len(how) != 2:
        raise ValueError(f"caption_text is (length, width) for hashed words, or a folder of embeddings, got {how!r}")

    def encode(prompts: Sequence[str]) -> dict[str, np.ndarray]:
        return hashed_text(prompts, *how)

    return Texts(encode([*captions, ""]), encode)


def _stored(captions: Sequence[str], folder: str | os.PathLike) -> Texts:
    tables = read_tables(folder)
    if len(tables["text"]) != len(captions) + 1:
        raise ValueError(
            f"{folder} has {len(tables['text'])} rows for {len(captions)} captions; store one row a caption and a last "
            "one for the empty prompt"
        )
    rows = {**{caption: i for i, caption in enumerate(captions)}, "": len(captions)}

    def encode(prompts: Sequence[str]) -> dict[str, np.ndarray]:
        for prompt in prompts:
            if prompt not in rows:
                near = nearest(prompt, rows)
                raise ValueError(f"{folder} holds embeddings of the data's captions only, not {prompt!r}{near}")
        where = [rows[prompt] for prompt in prompts]
        return {name: widen(np.asarray(table[where])) for name, table in tables.items()}

    return Texts(tables, encode)


def with_text(fetch: Fetch, tables: dict[str, np.ndarray]) -> Fetch:
    """Batches with the embeddings of their captions."""

    def fetch_all(positions: range, executor: Executor | None) -> dict[str, Any]:
        batch = fetch(positions, executor)
        rows = batch["caption_id"]
        return {**batch, **{name: widen(np.asarray(table[rows])) for name, table in tables.items()}}

    return fetch_all
