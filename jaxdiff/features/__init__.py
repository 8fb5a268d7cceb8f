"""Diffusion networks as feature extractors: every activation a candidate, filtered, compared, used."""

from jaxdiff.features.capture import WRAPPERS, capture, extract, fit_pca, noise
from jaxdiff.features.catalog import INTER_MODULE, Catalog, Tap, catalog
from jaxdiff.features.reference import SELECTIONS, reference_names
from jaxdiff.features.select import select

__all__ = [
    "INTER_MODULE",
    "SELECTIONS",
    "WRAPPERS",
    "Catalog",
    "Tap",
    "capture",
    "catalog",
    "extract",
    "fit_pca",
    "noise",
    "reference_names",
    "select",
]
