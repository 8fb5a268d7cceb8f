"""The example at each position of the endless order, reshuffled every epoch: a pure function of the seed.

Epochs are shuffled by a whole permutation, not by a per-index cipher: Grain 0.2.18's `shuffle` costs about 20
microseconds per index and leaves one epoch in a few hundred of a ten-example set unshuffled. NumPy guarantees that
`RandomState` streams never change, so upgrading it in the middle of a run keeps the order.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import numpy as np

Order = Callable[[np.ndarray], np.ndarray]


def order(size: int, seed: int, shuffle: bool = True) -> Order:
    """A function from positions (int64, any shape, no upper end) to example indices in [0, size)."""
    if not shuffle:
        return lambda positions: positions % size
    lock = threading.Lock()  # otherwise every decoding thread would compute the new epoch's permutation

    @functools.lru_cache(maxsize=2)  # batches straddle at most one epoch border, unless the set is tiny
    def permutation(epoch: int) -> np.ndarray:
        bits = np.random.MT19937(np.random.SeedSequence([seed, epoch]))
        return np.random.RandomState(bits).permutation(size)

    def look_up(positions: np.ndarray) -> np.ndarray:
        epochs, slots = np.divmod(positions, size)
        found = np.empty_like(slots)
        for epoch in np.unique(epochs):
            with lock:
                shuffled = permutation(int(epoch))
            here = epochs == epoch
            found[here] = shuffled[slots[here]]
        return found

    return look_up


def random_flips(seed: int, positions: np.ndarray) -> np.ndarray:
    """A fair 0/1 per position, each a hash of (seed, position): splitmix64's finaliser, vectorised."""
    start = np.random.SeedSequence(seed).generate_state(1, np.uint64)[0]
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is the point
        x = start + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x >> np.uint64(63)).astype(bool)
