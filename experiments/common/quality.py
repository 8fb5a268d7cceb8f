"""How near samples come to the data of a run, in the features of a network: distances that are not FIDs."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxdiff import evaluation
from jaxdiff.evaluation import FeatureNet
from jaxdiff.training import Run
from jaxdiff.training.evaluate import reference_features


class Quality:
    """Scores of images against the data of a run, or `eval.reference` of them, in the features of `net`."""

    def __init__(self, run: Run, net: FeatureNet) -> None:
        self.net = net
        self.real = reference_features(run, net).features

    def measure(self, images: Any, labels: Any = None) -> dict[str, float]:
        """Fréchet distance, precision, recall, density, coverage of images rounded to 8 bits; with labels, accuracy."""
        pixels = evaluation.to_uint8(np.asarray(images))
        found = evaluation.extract(self.net, [pixels], batch_size=min(500, len(pixels)), keep=True)
        scores = {"frechet": evaluation.frechet_distance(found.features, self.real)}
        if labels is not None:
            scores["accuracy"] = float((found.probabilities.argmax(1) == np.asarray(labels)).mean())
        return {**scores, **evaluation.prdc(self.real, found.features)}


class DigitQuality(Quality):
    """Scores of digits, in the features of the embedded classifier."""

    def __init__(self, run: Run) -> None:
        super().__init__(run, evaluation.feature_net("digits"))
