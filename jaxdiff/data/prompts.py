"""Prompts without images, for distillation without data: text embeddings in a folder of .npy files.

text.npy [n+1 l d] is required, text_mask.npy [n+1 l] and pooled.npy [n+1 d] are optional. The last row, n, is the empty
prompt, for guidance. The files are memory-mapped: only the rows of a batch are read.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxdiff.data.examples import Source, widen
from jaxdiff.files import DamagedFile

NAMES = ("text", "text_mask", "pooled")


def prompts(path: str, shape: Sequence[int]) -> Source:
    """One example per prompt; `shape` is that of the images or latents to generate, for example (64, 64, 4)."""
    tables = read_tables(path)
    rows = len(tables["text"])
    digest = hashlib.sha256(repr([(name, table.shape, str(table.dtype)) for name, table in tables.items()]).encode())
    digest.update(np.ascontiguousarray(tables["text"][:: max(1, rows // 64)]).data)
    return from_tables(Path(path).name, tables, shape, digest.hexdigest())


def read_tables(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """The folder's tables, memory-mapped, all with the same number of rows."""
    folder = Path(path).expanduser()
    if not (folder / "text.npy").is_file():
        raise FileNotFoundError(
            f"no text.npy in {folder.absolute()}: store the embeddings of your prompts there, [prompts + 1, tokens, "
            "width], the last row that of the empty prompt"
        )
    tables = {n: _mapped(folder / f"{n}.npy") for n in NAMES if (folder / f"{n}.npy").is_file()}
    rows = len(tables["text"])
    wrong = [f"{name}.npy {table.shape}" for name, table in tables.items() if len(table) != rows]
    if tables["text"].ndim != 3 or rows < 2 or wrong:
        raise ValueError(
            f"text.npy must be [prompts + 1, tokens, width], got {tables['text'].shape}; all files need as many rows"
            + (f", not {', '.join(wrong)}" if wrong else "")
        )
    return tables


def _mapped(path: Path) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise DamagedFile(f"{path} is damaged or not an array of numbers: {error}; write it with numpy.save") from error


def from_tables(name: str, tables: Mapping[str, np.ndarray], shape: Sequence[int], fingerprint: str) -> Source:
    """A source over tables whose last row is the empty prompt."""
    if not shape or any(int(side) != side or side < 1 for side in shape):
        raise ValueError(f"prompts need the shape of an image or latent, for example (64, 64, 4), got {shape}")
    size = len(tables["text"]) - 1
    blank = np.broadcast_to(np.float32(0), (size, *(int(side) for side in shape)))
    columns = {"image": blank, **{key: table[:size] for key, table in tables.items()}}
    return Source(
        name=name,
        size=size,
        read=lambda i: {key: column[i] for key, column in columns.items()},
        describe=lambda i: f"prompt {i} of {name}",
        fingerprint=fingerprint,
        arrays=columns,
        null={key: widen(np.asarray(table[size])) for key, table in tables.items()},
    )
