"""The sources by name, and `load`: from a name and options to a dataset."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

from jaxdiff.data.creatures import creatures
from jaxdiff.data.dataset import Dataset, build
from jaxdiff.data.examples import Source
from jaxdiff.data.folder import folder
from jaxdiff.data.huggingface import huggingface
from jaxdiff.data.latents import latents
from jaxdiff.data.memory import arrays, blank, digits
from jaxdiff.data.mixture import mixture
from jaxdiff.data.prompts import prompts
from jaxdiff.data.records import array_records
from jaxdiff.data.shapes import shapes
from jaxdiff.data.tfds import tfds
from jaxdiff.errors import nearest, pick
from jaxdiff.remote import is_remote, local

SOURCES: dict[str, Callable[..., Source]] = {
    "digits": digits,
    "arrays": arrays,
    "folder": folder,
    "array_records": array_records,
    "tfds": tfds,
    "huggingface": huggingface,
    "mixture": mixture,
    "creatures": creatures,
    "shapes": shapes,
    "blank": blank,
    "prompts": prompts,
    "latents": latents,
}


def load(source: str, /, **options: Any) -> Dataset:
    """The dataset `build(SOURCES[source](...), ...)`; each option goes to the function that takes it.

    load("digits", seed=1)
    load("folder", path="photos", image_size=64, crop="global", flip=True, control=("crop", "flip"))
    """
    constructor = pick(SOURCES, source, "data source")
    own = inspect.signature(constructor).parameters
    common = [name for name in inspect.signature(build).parameters if name != "source"]
    for name in options:
        if name not in own and name not in common:
            raise ValueError(
                f"unknown option {name!r} of data source {source!r}{nearest(name, [*own, *common])}; "
                f"it takes {', '.join(own)}; every source takes {', '.join(common)}"
            )
    for name, parameter in own.items():
        if parameter.default is parameter.empty and name not in options:
            raise ValueError(f"data source {source!r} needs the option {name!r}; it takes {', '.join(own)}")
    given = {name: _copied(value) for name, value in options.items() if name in own}
    return build(constructor(**given), **{name: value for name, value in options.items() if name not in own})


def _copied(value: Any) -> Any:
    """An option of a source; what it names at a URL is copied to a local cache."""
    if isinstance(value, (str, os.PathLike)):
        return local(value) if is_remote(value) else value
    if isinstance(value, (list, tuple)) and any(isinstance(part, str) for part in value):
        return type(value)(_copied(part) for part in value)
    return value
