"""Metrics together with the protocol that makes them reproducible."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

import jaxdiff
from jaxdiff.evaluation.frechet import Moments, frechet_distance, moments_of
from jaxdiff.evaluation.kid import kid
from jaxdiff.evaluation.metrics import inception_score
from jaxdiff.evaluation.prdc import prdc
from jaxdiff.remote import local

Record: TypeAlias = dict[str, Any]  # metrics by name, and `protocol`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Protocol:
    """What is needed to reproduce a number; None where a field does not apply.

    Fields without a default are mandatory: omitting them has made published FIDs irreproducible.
    """

    feature_net: str
    feature_sha256: str
    resize: str  # kind and side, as in FeatureNet.resize
    samples: int
    uint8: bool  # samples were rounded to 8 bits before they were measured
    reference: str
    reference_sha256: str
    reference_samples: int
    solver: str | None
    steps: int | None
    nfe: int | None
    guidance: float | None
    seed: int | None
    ema: str | float | None
    vae: str | None = None
    notes: str = ""
    jaxdiff: str = jaxdiff.__version__


def metric_name(feature_net: str) -> str:
    """'fid' for the FID Inception alone; a Fréchet distance in other features is named after its network."""
    return "fid" if feature_net == "inception" else f"frechet_{feature_net.rpartition(':')[2]}"  # of FILE.py:NAME


def _kid_name(feature_net: str) -> str:
    """'kid' for the FID Inception alone."""
    return "kid" if feature_net == "inception" else f"kernel_{feature_net}"


def evaluate_features(
    samples: ArrayLike | Moments,
    reference: ArrayLike | Moments,
    protocol: Protocol,
    *,
    probabilities: ArrayLike | None = None,
    spatial: tuple[Moments, Moments] | None = None,
    k: int = 5,
    splits: int = 10,
) -> Record:
    """All metrics that the features allow, by name, with the protocol: one record for `write`.

    `samples` and `reference` are feature arrays [n, d] or Moments. With Moments on either side there is only the
    Fréchet distance. `probabilities` [n, classes] of the samples add an Inception score, `spatial` moments of both sets
    sFID.
    """
    moments, wanted = moments_of(samples), moments_of(reference)
    _check_count("samples", protocol.samples, moments.count)
    _check_count("reference_samples", protocol.reference_samples, wanted.count)
    record: Record = {metric_name(protocol.feature_net): frechet_distance(moments, wanted)}
    if not isinstance(samples, Moments) and not isinstance(reference, Moments):
        record |= {**prdc(reference, samples, k), "prdc_k": k}
        mean, std = kid(samples, reference)
        name = _kid_name(protocol.feature_net)
        record |= {name: mean, f"{name}_std": std}
    if spatial is not None:
        record["sfid"] = frechet_distance(*spatial)
    if probabilities is not None:
        _check_count("samples", protocol.samples, np.shape(probabilities)[0])
        name = f"classifier_score_{protocol.feature_net}"
        if protocol.feature_net == "inception":
            name = "inception_score"
        mean, std = inception_score(probabilities, splits)
        record |= {name: mean, f"{name}_std": std, "score_splits": splits}
    return {**record, "protocol": dataclasses.asdict(protocol)}


def _check_count(field: str, stated: int, seen: int) -> None:
    if stated != seen:
        raise ValueError(f"the protocol states {field}={stated}, but {seen} were given; correct one of them")


def write(path: str | os.PathLike, record: Record) -> None:
    """Append the record to `path` as one JSON line, in one write, so that a crash leaves at most one partial record."""
    line = json.dumps(record, allow_nan=False, default=_plain).encode() + b"\n"
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(handle).st_size
        if size and os.pread(handle, 1, size - 1) != b"\n":
            line = b"\n" + line  # an earlier write was truncated: start a new line
        os.write(handle, line)
        os.fsync(handle)
    finally:
        os.close(handle)


def _plain(value: object) -> object:
    """NumPy and JAX scalars and small arrays as JSON values."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a record holds numbers, strings and lists, got {type(value).__name__}")


def digest(source: str | os.PathLike | ArrayLike) -> str:
    """sha256 of a file's bytes, or of an array's dtype, shape and bytes: the hash a protocol names."""
    if isinstance(source, (str, os.PathLike)):
        with open(local(source), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    array = np.ascontiguousarray(source)
    return hashlib.sha256(f"{array.dtype.str}{array.shape}".encode() + array.tobytes()).hexdigest()


def to_uint8(images: Any) -> Any:
    """Pixels in [-1, 1] as 8-bit values, trunc(clip(127.5 x + 128, 0, 255)): how samples are stored, then measured."""
    return (images * 127.5 + 128).clip(0, 255).astype(np.uint8)


def from_uint8(images: Any) -> Any:
    """8-bit values as pixels in [-1, 1], float32; the inverse of `to_uint8` on stored images."""
    return images.astype(np.float32) / 127.5 - 1
