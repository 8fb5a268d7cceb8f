"""Captions as conditions: text encoders that turn prompts into rows of embeddings."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxdiff.data.examples import Batch, Fetch, widen
from jaxdiff.data.hashed import hashed_text
from jaxdiff.data.prompts import read_tables
from jaxdiff.errors import nearest, pick

Rows = dict[str, np.ndarray]  # text, text_mask and pooled of some prompts
TextEncoder = Callable[[Sequence[str]], Rows]


def mean_of_tokens(rows: Rows) -> Rows:
    """The rows with `pooled` as the mean over unmasked tokens."""
    text = rows["text"]
    mask = np.asarray(rows.get("text_mask", np.ones(text.shape[:2])), np.float32)
    pooled = np.einsum("nl,nld->nd", mask, text) / np.maximum(mask.sum(1, keepdims=True), 1)
    return {**rows, "pooled": pooled}


POOLINGS: dict[str, Callable[[Rows], Rows]] = {"": lambda rows: rows, "mean": mean_of_tokens}


@dataclass(frozen=True)
class HashedText:
    """Embeds prompts by hashing words; it has no weights, so its fields are enough to rebuild it."""

    length: int
    width: int
    pooling: str = ""

    def __call__(self, prompts: Sequence[str]) -> Rows:
        pool = pick(POOLINGS, self.pooling, "pooling of text")
        return pool(hashed_text(prompts, self.length, self.width))

    def describe(self) -> dict[str, int | str]:
        """The fields, as JSON."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, eq=False)
class StoredText:
    """Embeddings of known captions; `null` holds those of the empty prompt."""

    captions: Sequence[str]
    rows: Mapping[str, np.ndarray]
    null: Mapping[str, np.ndarray]
    source: str

    def __call__(self, prompts: Sequence[str]) -> Rows:
        number = {caption: i for i, caption in enumerate(self.captions)}
        for prompt in prompts:
            if prompt and prompt not in number:
                near = nearest(prompt, number)
                raise ValueError(f"{self.source} has embeddings of {len(number)} captions, but not of {prompt!r}{near}")
        found = {}
        for name, table in self.rows.items():
            rows = [np.asarray(table[number[p]]) if p else np.asarray(self.null[name]) for p in prompts]
            found[name] = widen(np.stack(rows))
        return found


class Captions(NamedTuple):
    """Embeddings by caption number, those of the empty prompt, and the encoder of prompts."""

    rows: Callable[[np.ndarray], Rows]
    null: Rows
    encoder: TextEncoder


def embed(captions: Sequence[str], how: str | os.PathLike | Sequence[int], pooling: str = "") -> Captions:
    """Embeddings of captions: `how` = (length, width) hashes words, a folder has .npy files as for `prompts`.

    pooling "mean" makes `pooled` the mean over tokens, "" keeps the stored one.
    """
    pool = pick(POOLINGS, pooling, "pooling of text")
    if not captions:
        raise ValueError(f"caption_text={how!r} needs a data source with captions; remove it, or add captions")
    if isinstance(how, (str, os.PathLike)):
        return _stored(captions, how, pool)
    if len(how) != 2:
        raise ValueError(f"caption_text is (length, width) for hashed words, or a folder of embeddings, got {how!r}")
    length, width = how
    encoder = HashedText(length, width, pooling)
    tables = encoder(captions)
    null = {name: rows[0] for name, rows in encoder([""]).items()}
    return Captions(lambda where: {name: table[where] for name, table in tables.items()}, null, encoder)


def _stored(captions: Sequence[str], folder: str | os.PathLike, pool: Callable[[Rows], Rows]) -> Captions:
    tables = read_tables(folder)
    if len(tables["text"]) != len(captions) + 1:
        raise ValueError(
            f"{folder} has {len(tables['text'])} rows for {len(captions)} captions; store one row per caption and a "
            "last one for the empty prompt"
        )

    def rows(where: np.ndarray) -> Rows:
        return pool({name: widen(np.asarray(table[where])) for name, table in tables.items()})

    null = {name: value[0] for name, value in rows(np.array([len(captions)])).items()}
    stored = StoredText(captions, tables, {n: t[len(captions)] for n, t in tables.items()}, str(folder))
    return Captions(rows, null, lambda prompts: pool(stored(prompts)))


def with_text(fetch: Fetch, captions: Captions) -> Fetch:
    """Batches with the embeddings of their captions."""

    def fetch_all(positions: range, executor: Executor | None) -> Batch:
        batch = fetch(positions, executor)
        return {**batch, **captions.rows(batch["caption_id"])}

    return fetch_all
