"""Distances between sets of images, the features they are computed in, and the evaluation protocol.

The distances need only NumPy; modules that run networks are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

from jaxdiff.evaluation.frechet import Moments, frechet_distance, load_moments, load_stats, moments_of, save_moments
from jaxdiff.evaluation.kid import kid
from jaxdiff.evaluation.metrics import inception_score, sliced_wasserstein
from jaxdiff.evaluation.prdc import prdc
from jaxdiff.evaluation.report import (
    Protocol,
    Record,
    digest,
    evaluate_features,
    from_uint8,
    metric_name,
    to_uint8,
    write,
)

_LAZY = {
    "DigitsClassifier": "classifier",
    "Extracted": "features",
    "FeatureCache": "cache",
    "FeatureNet": "features",
    "extract": "features",
    "extract_cached": "cache",
    "feature_net": "features",
}

__all__ = [
    "DigitsClassifier",
    "Extracted",
    "FeatureCache",
    "FeatureNet",
    "Moments",
    "Protocol",
    "Record",
    "digest",
    "evaluate_features",
    "extract",
    "extract_cached",
    "feature_net",
    "frechet_distance",
    "from_uint8",
    "inception_score",
    "kid",
    "load_moments",
    "load_stats",
    "metric_name",
    "moments_of",
    "prdc",
    "save_moments",
    "sliced_wasserstein",
    "to_uint8",
    "write",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'jaxdiff.evaluation' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
