"""Checksums of arrays that do not depend on how an array is split over devices or processes.

With b_i the bits of element i as an unsigned integer and i its index in row-major order, an array has the sums

    S = sum_i b_i,    T = sum_i b_i (2 i + 1)        (mod 2^64)

Sums over disjoint parts of an array add up to those of the whole, so that each process contributes the parts it holds
and a state saved on 8 devices is verified on 1. A change of one element always changes T, as 2 i + 1 is invertible
mod 2^64; a change of two elements of 32 bits changes S or T. `digest` condenses the sums of many arrays, with their
names, dtypes and shapes. This guards against damage, not against an adversary.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

BLOCK = 2**16  # elements summed at once: their 64-bit copy stays in the cache
RAMP = np.arange(BLOCK, dtype=np.uint64)
MASK = 2**64 - 1


def sums(part: np.ndarray, shape: Sequence[int] | None = None, start: Sequence[int] = ()) -> np.ndarray:
    """(S, T) of the part of an array of that shape which begins at index `start`; by default it is the whole."""
    shape = part.shape if shape is None else tuple(shape)
    start = tuple(start) or (0,) * len(shape)
    bits, offsets = _rows(part, shape, start)
    total, moment = 0, 0  # sum of b_i, sum of b_i i
    for block, offset in _blocks(bits, offsets):
        wide = block.astype(np.uint64)
        row = wide.sum(1)
        total += int(row.sum())
        moment += int((wide @ RAMP[: wide.shape[1]]).sum()) + int((row * offset).sum())
    return np.array([total & MASK, (2 * moment + total) & MASK], np.uint64)


def _rows(part: np.ndarray, shape: tuple[int, ...], start: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The bits as [rows, columns], each row contiguous in the whole array, and the index where each row begins."""
    bits = np.ascontiguousarray(part).view(f"u{part.dtype.itemsize}") if part.dtype.itemsize <= 8 else part
    if bits.dtype.kind != "u":
        raise ValueError(f"checksums are of arrays with elements of 1, 2, 4 or 8 bytes, got {part.dtype}")
    whole = len(shape)  # axes from here on are complete
    while whole and part.shape[whole - 1] == shape[whole - 1]:
        whole -= 1
    whole = max(whole - 1, 0)  # a part of the axis before them is contiguous too
    strides = [int(np.prod(shape[axis + 1 :], dtype=np.int64)) for axis in range(len(shape))]
    offsets = np.zeros((), np.uint64)
    for axis in range(whole):
        steps = (start[axis] + np.arange(part.shape[axis])) * strides[axis]
        offsets = offsets[..., None] + steps.astype(np.uint64)
    first = start[whole] * strides[whole] if shape else 0
    columns = int(np.prod(part.shape[whole:], dtype=np.int64))
    return bits.reshape(-1, columns) if part.size else bits.reshape(0, 1), offsets.reshape(-1) + np.uint64(first)


def _blocks(bits: np.ndarray, offsets: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Blocks of at most BLOCK elements, and the index where each of their rows begins."""
    rows, columns = bits.shape
    if columns <= BLOCK:
        for row in range(0, rows, BLOCK // columns):
            yield bits[row : row + BLOCK // columns], offsets[row : row + BLOCK // columns]
        return
    for row in range(rows):
        for column in range(0, columns, BLOCK):
            yield bits[row : row + 1, column : column + BLOCK], offsets[row : row + 1] + np.uint64(column)


def add(parts: np.ndarray) -> np.ndarray:
    """The sums of arrays [arrays 2] from those of their parts [parts arrays 2]."""
    return parts.sum(0, dtype=np.uint64)


def digest(arrays: Mapping[str, tuple[str, Sequence[int], np.ndarray]], fields: Mapping[str, str] | None = None) -> str:
    """One line of hexadecimal for named (dtype, shape, sums), and for fields that are stored with them."""
    lines = [[name, dtype, list(shape), [int(s) for s in found]] for name, (dtype, shape, found) in arrays.items()]
    text = json.dumps([sorted(lines), sorted((fields or {}).items())])
    return hashlib.sha256(text.encode()).hexdigest()


def digest_of(arrays: Mapping[str, np.ndarray], fields: Mapping[str, str] | None = None) -> str:
    """The digest of arrays that are here as a whole."""
    return digest({name: (str(a.dtype), a.shape, sums(a)) for name, a in arrays.items()}, fields)
