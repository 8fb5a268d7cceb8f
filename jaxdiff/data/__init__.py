"""Data: sources, transforms with control metadata, and batches that are a pure function of (seed, step)."""

from jaxdiff.data.creatures import Creatures, creature_set
from jaxdiff.data.dataset import Dataset, build, local_slice
from jaxdiff.data.examples import Source
from jaxdiff.data.hashed import hashed_text
from jaxdiff.data.mixture import MIXTURES, mixture_components, mixture_means
from jaxdiff.data.pipeline import Prefetch, prefetch
from jaxdiff.data.records import write_array_records
from jaxdiff.data.shapes import Shapes, caption_scores, read_shapes, shape_set
from jaxdiff.data.sources import SOURCES, load
from jaxdiff.data.spec import DataSpec
from jaxdiff.data.tokens import tokenizer
from jaxdiff.data.transforms import CROPS, CorruptImage, decode, resize

__all__ = [
    "CROPS",
    "MIXTURES",
    "SOURCES",
    "CorruptImage",
    "Creatures",
    "DataSpec",
    "Dataset",
    "Prefetch",
    "Shapes",
    "Source",
    "build",
    "caption_scores",
    "creature_set",
    "decode",
    "hashed_text",
    "load",
    "local_slice",
    "mixture_components",
    "mixture_means",
    "prefetch",
    "read_shapes",
    "resize",
    "shape_set",
    "tokenizer",
    "write_array_records",
]
