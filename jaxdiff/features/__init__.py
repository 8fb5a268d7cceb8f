"""Diffusion networks as feature extractors: every activation a candidate, filtered, compared, used."""

from jaxdiff.features import probes, scoring, store
from jaxdiff.features.capture import WRAPPERS, capture, extract, noise
from jaxdiff.features.catalog import INTER_MODULE, Catalog, Tap, catalog
from jaxdiff.features.pictures import heat_map, pca_pictures
from jaxdiff.features.reference import SELECTIONS, reference_names
from jaxdiff.features.select import Filter, Score, Selection, compare, load_selection, prune, select
from jaxdiff.features.statistics import (
    cka,
    fit_pca,
    granularity,
    locality,
    neighbour_locality,
    noise_leak,
    noise_to_signal,
)

__all__ = [
    "INTER_MODULE", "SELECTIONS", "WRAPPERS", "Catalog", "Filter", "Score", "Selection", "Tap", "capture", "catalog",
    "cka", "compare", "extract", "fit_pca", "granularity", "heat_map", "load_selection", "locality",
    "neighbour_locality", "noise", "noise_leak", "noise_to_signal", "pca_pictures", "probes", "prune",
    "reference_names", "scoring", "select", "store",
]  # fmt: skip
