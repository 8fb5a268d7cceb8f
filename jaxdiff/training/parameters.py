"""The loader of external parameters: a run's export, or a file of public weights.

loaded = read(source, kind, model)           arrays by name, with the conventions they were trained in
check_convention(loaded, convention)         reject a network of another convention
tree = fitted(loaded, shapes)                the parameters as a pytree, checked
tree = place(tree, declared)                 in the declared sharding
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from flax import linen as nn
from ml_collections import ConfigDict

from jaxdiff import weights
from jaxdiff.conditions import Conditions
from jaxdiff.conventions import DDPM, Convention
from jaxdiff.errors import choose
from jaxdiff.methods import Frozen
from jaxdiff.training import bucket, components, export
from jaxdiff.trees import Params, Tree, by_name, mismatches, path_name

PUBLIC = tuple(name for name, kind in weights.KINDS.items() if kind.conventions)  # kinds of weights of denoisers
# fields that cannot be inferred from a file
LAYOUT = (
    *("heads", "head_width", "groups", "scan"),
    *("channels_per_head", "label_balance", "concat_balance", "res_balance", "attn_balance"),
)


class Loaded(NamedTuple):
    """Parameters by name, and the conventions they may be used with; () if unknown, as for an export without config."""

    arrays: Mapping[str, np.ndarray]
    conventions: tuple[Convention, ...]
    source: str


def read(source: str | Path, kind: str, model: nn.Module) -> Loaded:
    """The parameters in a run's workdir or exported file (kind "run"), or in public weights of that kind.

    The layout of public weights follows `model` where it cannot be inferred from the file.
    """
    path = bucket.reading(source)
    choose(kind, ("run", *PUBLIC), "kind of parameters")
    if kind == "run":
        conventions = (components.convention_of(export.read_config(path)),) if path.is_dir() else ()
        return Loaded(export.read_arrays(path), conventions, str(source))
    known = weights.KINDS[kind].model.__dataclass_fields__
    layout = {name: getattr(model, name) for name in LAYOUT if name in known and hasattr(model, name)}
    loaded, params = weights.load(path, kind, **layout)
    return Loaded(by_name(params), weights.KINDS[kind].conventions, f"{source} ({type(loaded).__name__})")


def check_convention(loaded: Loaded, convention: Convention, *, rescaled: bool = False) -> None:
    """The network was trained in this convention; with `rescaled`, its noise shift may differ."""
    ours, theirs = convention, loaded.conventions
    if rescaled:
        ours, theirs = _unshifted(ours), tuple(_unshifted(other) for other in theirs)
    if theirs and ours not in theirs:
        known = " or ".join(map(repr, theirs))
        raise ValueError(
            f"{loaded.source} was trained as {known}, this run is configured as {ours!r}; set denoiser.kind, "
            "denoiser.schedule, denoiser.prediction, denoiser.sigma_data, denoiser.time_scale, denoiser.to_data and "
            "noise.shift to match"
        )


def check_public(kind: str, source: str, convention: Convention, *, rescaled: bool = False) -> None:
    """Public weights of that kind were trained in this convention; no file is read."""
    if kind in PUBLIC:
        check_convention(
            Loaded({}, weights.KINDS[kind].conventions, f"{source} ({kind})"), convention, rescaled=rescaled
        )


def _unshifted(convention: Convention) -> Convention:
    return replace(convention, shift=1.0) if isinstance(convention, DDPM) else convention


def fitted(loaded: Loaded, shapes: Params) -> Params:
    """The parameters as a pytree like `shapes`; missing, unknown and mis-shaped arrays are errors."""
    wrong = mismatches(loaded.arrays, by_name(shapes))
    if wrong:
        raise ValueError(f"{loaded.source} does not match model.fields: {wrong}")
    return jax.tree_util.tree_map_with_path(lambda path, leaf: loaded.arrays[path_name(path)], shapes)


def frozen_base(
    config: ConfigDict, model: nn.Module, convention: Convention, conditions: Conditions, shape: tuple[int, ...]
) -> Frozen:
    """The parameters of train.init_from as the frozen base of low-rank updates; all of the network's must be there."""

    def shapes() -> Params:
        return shapes_of(model, conditions, shape)

    def load() -> Params:
        loaded = read(config.train.init_from, config.train.init_kind, model)
        check_convention(loaded, convention, rescaled=True)
        return fitted(loaded, shapes())

    return Frozen(shapes, load)


def place(tree: Tree, declared: Tree) -> Tree:
    """Host arrays in the dtypes and shardings of `declared`."""

    def put(array: np.ndarray, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.device_put(np.asarray(array, leaf.dtype), leaf.sharding)

    return jax.tree.map(put, tree, declared)


def shapes_of(model: nn.Module, conditions: Conditions, shape: tuple[int, ...]) -> Params:
    """Shapes of a network's parameters; nothing is computed."""
    return jax.eval_shape(lambda: initial(model, conditions, shape, 0))


def initial(model: nn.Module, conditions: Conditions, shape: tuple[int, ...], seed: int) -> Params:
    """Freshly initialised parameters of a network for examples of that shape."""
    taken = {name: value for name, value in (conditions.example(1) or {}).items() if name in model.signals()}
    image, label = np.zeros((1, *shape), np.float32), np.ones(1, np.float32)
    return jax.jit(model.init)(jax.random.key(seed), image, label, taken or None)["params"]
