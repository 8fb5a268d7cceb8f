"""Prompts to token ids, by the tokenizer.json of public text encoders. Nothing is downloaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32

from jaxdiff.errors import nearest, optional_import
from jaxdiff.remote import local

Tokenize = Callable[[Sequence[str]], tuple[Int32[np.ndarray, "b l"], Bool[np.ndarray, "b l"]]]
PADS = ("<pad>", "[PAD]", "<|endoftext|>")  # of T5, BERT and the first CLIP


def tokenizer(path: str | os.PathLike, length: int, pad: str | None = None) -> Tokenize:
    """A function from prompts to (ids [b length], mask [b length]), truncated or padded to `length`.

    `path` is a tokenizer.json or its folder. `length` is the encoder's: 77 for CLIP. The mask is false at
    padding. `pad` is the padding token, by default that of the file or one of <pad>, [PAD],
    <|endoftext|>; the bigG encoder of SDXL and SD3 was trained with "!".
    """
    library = _library()
    path = local(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(
            f"no tokenizer at {file}; tried {file.resolve()}: give the tokenizer.json that is published with the "
            "text encoder's weights, or its folder"
        )
    rules = _read(library, file)
    least = rules.num_special_tokens_to_add(is_pair=False) + 1
    if length < least:
        raise ValueError(f"length={length} leaves no room for text: this tokenizer needs at least {least} tokens")
    pad = pad or _pad(rules, file)
    number = rules.token_to_id(pad)
    if number is None:
        raise ValueError(f"{file} has no token {pad!r}{nearest(pad, rules.get_vocab())}; choose another pad=")
    rules.enable_truncation(length)
    rules.enable_padding(length=length, pad_id=number, pad_token=pad)

    def tokenize(prompts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        if isinstance(prompts, str):
            raise ValueError(f"a tokenizer takes a list of prompts, got one string; give [{prompts!r}]")
        rows = rules.encode_batch(list(prompts))
        ids, mask = ([getattr(row, name) for row in rows] for name in ("ids", "attention_mask"))
        return np.asarray(ids, np.int32).reshape(-1, length), np.asarray(mask, bool).reshape(-1, length)

    return tokenize


def _library() -> Any:
    return optional_import("tokenizers", "tokenizing text", "text")


def _read(library: Any, file: Path) -> Any:
    try:
        return library.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{file} is not a tokenizer.json that the tokenizers library reads: {error}") from error


def _pad(rules: Any, file: Path) -> str:
    if rules.padding:
        return rules.padding["pad_token"]
    known = [token for token in PADS if rules.token_to_id(token) is not None]
    if not known:
        raise ValueError(f"{file} defines no padding token and has none of {', '.join(PADS)}; give pad=")
    return known[0]
