"""How near samples come to the digits, in the features of the embedded classifier: distances that are not FIDs."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxdiff import evaluation
from jaxdiff.training import Run
from jaxdiff.training.evaluate import reference_features


class DigitQuality:
    """Scores of images against the data of a run on the digits."""

    def __init__(self, run: Run) -> None:
        self.net = evaluation.feature_net("digits")
        self.real = reference_features(run, self.net).features

    def measure(self, images: Any, labels: Any = None) -> dict[str, float]:
        """Fréchet distance, precision, recall, density, coverage of images rounded to 8 bits; with labels, accuracy."""
        pixels = evaluation.to_uint8(np.asarray(images))
        found = evaluation.extract(self.net, [pixels], batch_size=min(500, len(pixels)), keep=True)
        scores = {"frechet": evaluation.frechet_distance(found.features, self.real)}
        if labels is not None:
            scores["accuracy"] = float((found.probabilities.argmax(1) == np.asarray(labels)).mean())
        return {**scores, **evaluation.prdc(self.real, found.features)}
