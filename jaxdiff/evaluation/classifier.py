"""A small classifier of the embedded 8x8 digits: features (64) and probabilities without public weights.

Its weights ship with the package; `experiments/evaluation/train_digits_classifier.py` reproduces them.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import jax
import numpy as np
from flax import linen as nn
from flax.traverse_util import unflatten_dict
from jaxtyping import Array, Float

from jaxdiff.files import read_npz
from jaxdiff.trees import Params

WEIGHTS = Path(__file__).parent / "digits_classifier.npz"
FULL = jax.lax.Precision.HIGHEST


class DigitsClassifier(nn.Module):
    """Digits [b 8 8 1] in [-1, 1] to {"features": [b, 64], "logits": [b, 10]}."""

    widths: tuple[int, int] = (16, 32)
    features: int = 64

    @nn.compact
    def __call__(self, x: Float[Array, "b h w c"]) -> dict[str, Array]:
        if x.shape[1:] != (8, 8, 1):
            raise ValueError(f"the digits classifier takes images [b, 8, 8, 1], got {x.shape}; use another network")
        for i, width in enumerate(self.widths):
            x = nn.relu(nn.Conv(width, (3, 3), precision=FULL, name=f"conv{i}")(x))
        x = nn.max_pool(x, (2, 2), (2, 2))
        features = nn.relu(nn.Dense(self.features, precision=FULL, name="hidden")(x.reshape(len(x), -1)))
        return {"features": features, "logits": nn.Dense(10, precision=FULL, name="out")(features)}


def load(path: str | os.PathLike | None = None) -> tuple[DigitsClassifier, Params, str]:
    """The classifier, its float32 parameters and the sha256 of the file they come from."""
    return DigitsClassifier(), *stored(Path(path or WEIGHTS))


def stored(path: Path) -> tuple[Params, str]:
    """Float32 parameters from an .npz file of arrays named by their dotted path, and its sha256."""
    flat = {tuple(name.split(".")): array.astype(np.float32) for name, array in read_npz(path).items()}
    return unflatten_dict(flat), hashlib.sha256(path.read_bytes()).hexdigest()
