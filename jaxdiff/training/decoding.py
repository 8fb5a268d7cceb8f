"""Latents to images: the autoencoder of config.autoencoder."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxdiff import latents, weights
from jaxdiff.data import Dataset
from jaxdiff.errors import pick

KINDS = {"sd_vae": 0, "sdxl_vae": 0, "taesd": 0}  # of weights that decode latents


def decoder(config: ConfigDict, dataset: Dataset) -> Callable[[Any], Any] | None:
    """Latents to images by the config's autoencoder, whose weights are read when the first are decoded."""
    c = config.autoencoder
    if not c.kind:
        return None
    pick(KINDS, c.kind, "autoencoder kind")
    if not Path(c.path).expanduser().is_file():
        raise FileNotFoundError(
            f"no weights of an autoencoder at {c.path!r}: give --config.autoencoder.path=FILE (docs/weights.md tells "
            "where they come from), or --config.autoencoder.kind= to leave samples as latents"
        )

    @functools.cache
    def loaded() -> tuple[Any, Any]:
        model, params = weights.load(Path(c.path).expanduser(), c.kind, **dict(c.options.items()))
        stored = dict(dataset.latent or latents.units(model))
        if model.channels != dataset.image_shape[-1] or stored != latents.units(model):
            raise ValueError(
                f"{c.path} is not the autoencoder that made {dataset.name}: it decodes {model.channels} channels with "
                f"{latents.units(model)}, the latents have {dataset.image_shape[-1]} with {stored}"
            )
        return model, params

    return lambda z: latents.decode(*loaded(), z)
