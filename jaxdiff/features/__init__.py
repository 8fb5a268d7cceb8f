"""Diffusion networks as feature extractors: a catalogue of activations, their selection and use."""

from jaxdiff.features import probes, scoring, store
from jaxdiff.features.capture import capture, extract, noise, sigma_of
from jaxdiff.features.catalog import INTER_MODULE, Catalog, Tap, catalog
from jaxdiff.features.figures import heat_map, pca_images
from jaxdiff.features.massive import massive_channels
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
from jaxdiff.features.streaming import stream

__all__ = [
    "INTER_MODULE", "SELECTIONS", "Catalog", "Filter", "Score", "Selection", "Tap", "capture", "catalog",
    "cka", "compare", "extract", "fit_pca", "granularity", "heat_map", "load_selection", "locality",
    "massive_channels", "neighbour_locality", "noise", "noise_leak", "noise_to_signal", "pca_images", "probes", "prune",
    "reference_names", "scoring", "select", "sigma_of", "store", "stream",
]  # fmt: skip
