"""Which examples of a dataset an evaluation looks at.

The first `count` of one fixed permutation of its examples: sources are often sorted by class, so the first examples of
one are a few classes. The permutation depends on the size of the dataset alone, never on the run.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jaxdiff.data import Dataset

SEED = 0


def permuted(size: int) -> np.ndarray:
    """The permutation of `size` examples; NumPy guarantees that this stream never changes."""
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence(SEED))).permutation(size)


def chosen(size: int, count: int = 0) -> np.ndarray:
    """The indices of `count` examples of `size` (0: all), ascending."""
    return np.sort(permuted(size)[: count or size])


def images(data: Dataset, indices: np.ndarray, batch_size: int = 256) -> Iterator[np.ndarray]:
    """Images at these positions of a dataset, in batches."""
    for start in range(0, len(indices), batch_size):
        here = indices[start : start + batch_size]
        breaks = np.flatnonzero(np.diff(here) != 1) + 1  # read neighbours together
        runs = np.split(here, breaks)
        yield np.concatenate([data.take(int(run[0]), int(run[-1]) + 1)["image"] for run in runs])
