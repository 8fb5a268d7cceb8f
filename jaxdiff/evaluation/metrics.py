"""Inception score and sliced Wasserstein distance, in float64 on the host."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import ArrayLike

from jaxdiff.evaluation.frechet import check_features


def inception_score(probabilities: ArrayLike, splits: int = 10) -> tuple[float, float]:
    """Mean and standard deviation over `splits` of exp(E_x KL(p(y|x) || p(y))) (Salimans et al. 2016).

    `probabilities` [n, classes] are taken in the order given, split into equal runs. It depends on `splits` and on
    the classifier: 1 when all predictions agree, the number of classes when they are certain and balanced.
    """
    p = check_features(probabilities, "probabilities")
    if (p < 0).any() or not np.allclose(p.sum(1), 1, atol=1e-3):
        raise ValueError("probabilities must be non-negative rows that sum to 1; apply a softmax to logits first")
    if p.shape[1] < 2:
        raise ValueError(
            "an Inception score needs the probabilities of several classes, got one: a network without logits has none"
        )
    if not 1 <= splits <= len(p):
        raise ValueError(f"splits must be between 1 and the number of samples, {len(p)}; got {splits}")
    edges = np.arange(splits + 1) * len(p) // splits
    scores = [_score(p[start:stop]) for start, stop in itertools.pairwise(edges)]
    return float(np.mean(scores)), float(np.std(scores))


def _score(p: np.ndarray) -> float:
    """exp of the mutual information between sample and class, as the entropy of the mean less the mean entropy."""
    return float(np.exp(_entropy(p.mean(0)) - _entropy(p).mean()))


def _entropy(p: np.ndarray) -> np.ndarray | np.floating:
    """-sum p log p over the last axis, with 0 log 0 = 0."""
    return -(p * np.log(np.where(p > 0, p, 1))).sum(-1)


def sliced_wasserstein(a: ArrayLike, b: ArrayLike, projections: int = 256, seed: int = 0) -> float:
    """sqrt(E W_2^2) of both sets projected on random directions: 0 for equal sets, |shift| / sqrt(d) for shifted ones.

    a [n, d] and b [m, d] may differ in size: one-dimensional optimal transport is exact for any two sizes. The
    directions depend on (seed, d, projections) only.
    """
    a, b = check_features(a, "a"), check_features(b, "b")
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"points of dimension {a.shape[1]} and {b.shape[1]} cannot be compared")
    if not len(a) or not len(b) or projections < 1:
        raise ValueError(f"both sets and projections must be non-empty, got {len(a)}, {len(b)}, {projections}")
    directions = np.random.default_rng(seed).standard_normal((projections, a.shape[1]))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    blocks = np.array_split(directions, -(-projections // 64))  # bounded memory
    return float(np.sqrt(np.concatenate([_squared_w2(a @ block.T, b @ block.T) for block in blocks]).mean()))


def _squared_w2(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """W_2^2 of each column: the integral of squared differences of the quantile functions, piecewise constant."""
    n, m = len(a), len(b)
    edges = np.unique(np.concatenate([np.arange(n + 1) * m, np.arange(m + 1) * n]))  # in units of 1 / (n m): exact
    rows_a, rows_b = edges[:-1] // m, edges[:-1] // n
    gaps = np.sort(a, axis=0)[rows_a] - np.sort(b, axis=0)[rows_b]
    return (np.diff(edges) / (n * m)) @ np.square(gaps)
