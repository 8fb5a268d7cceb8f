"""Uses of features: a linear probe of image labels, correspondence, segmentation."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from jaxdiff.features.correspondence import (
    Aggregation,
    box_extent,
    concatenate,
    fit_aggregation,
    match,
    pck,
)
from jaxdiff.features.segmentation import (
    IGNORE,
    DenseHead,
    PixelEnsemble,
    confusion,
    fit_dense,
    fit_pixels,
    iou,
    mean_iou,
)
from jaxdiff.features.statistics import fit_ridge
from jaxdiff.trees import AnyArray

__all__ = [
    "IGNORE", "Aggregation", "DenseHead", "PixelEnsemble", "box_extent", "concatenate", "confusion", "fit_aggregation",
    "fit_dense", "fit_pixels", "iou", "linear_probe", "match", "mean_iou", "pck",
]  # fmt: skip


def linear_probe(
    train: tuple[AnyArray, ArrayLike], test: tuple[AnyArray, ArrayLike], classes: int | None = None, ridge: float = 1e-2
) -> tuple[float, np.ndarray]:
    """Test accuracy and predictions of a ridge regression of one-hot labels on features [n ...], flattened.

    `ridge` is relative to the number of training images, over standardised channels.
    """
    (x, y), (x_test, y_test) = (
        (np.asarray(f, np.float64).reshape(len(f), -1), np.asarray(labels, np.int64)) for f, labels in (train, test)
    )
    if len(x) != len(y) or len(x_test) != len(y_test) or x.shape[1] != x_test.shape[1]:
        raise ValueError(
            f"a probe needs one label per image and features of one width, got {x.shape} with {y.shape} labels for "
            f"training, {x_test.shape} with {y_test.shape} for testing"
        )
    onehot = np.eye(classes or int(max(y.max(), y_test.max())) + 1)[y]
    predicted = fit_ridge(x, onehot, ridge)(x_test).argmax(-1)
    return float((predicted == y_test).mean()), predicted
