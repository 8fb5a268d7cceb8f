"""What of a run's data reaches its network as conditions: controls, null values, padded texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from ml_collections import ConfigDict

from jaxdiff.data import Dataset
from jaxdiff.denoisers import Cond
from jaxdiff.methods import Method
from jaxdiff.models import conditioning

Padding = Callable[[Any, Any], Any]  # (cond, keys [b]) -> cond


def with_controls(config: ConfigDict, model: Any, dataset: Dataset) -> Dataset:
    """The dataset with those of its controls that the model takes; one it lacks is an error."""
    control = getattr(model, "control", None)
    if any(getattr(model, name, 0) for name in ("augment_dim", "size_embed", "sizes")):
        return dataset  # the published forms check what they are given
    keys = control.keys if control else ()
    recorded = tuple(dataset.take(0, 1).get("control", {})) if keys or config.data.options.get("control") else ()
    missing = [key for key in keys if key not in recorded]
    if missing:
        raise ValueError(
            f"the model takes the controls {', '.join(keys)}, the data record {', '.join(recorded) or 'none'}; set "
            f"data.options.control={keys}, or leave {', '.join(missing)} out of model.fields.control.keys"
        )
    if control:
        conditioning.default_control(control, dataset.image_shape, **config.sample.control)
    if set(recorded) == set(keys):
        return dataset

    def fetch(positions: range, executor: Executor | None) -> dict[str, Any]:
        batch = dict(dataset.fetch(positions, executor))
        given = batch.pop("control")
        return {**batch, "control": {key: given[key] for key in keys}} if keys else batch

    return dataclasses.replace(dataset, fetch=fetch)


def null_of(config: ConfigDict, model: Any, dataset: Dataset, pad: Padding | None) -> Cond:
    """What stands for each condition not being given, where training drops it."""
    null: dict[str, Any] = {"label": model.num_classes} if getattr(model, "num_classes", 0) else dict(dataset.null)
    if pad is not None:
        null = jax.tree.map(lambda a: a[0], pad(jax.tree.map(lambda a: a[None], null), fixed_keys(1)))
    if config.cond.control_drop and not getattr(model, "control", None):
        raise ValueError(f"cond.control_drop={config.cond.control_drop} needs a model with model.fields.control")
    if config.cond.control_drop:
        null["control"] = conditioning.UNKNOWN
    if config.sample.control_guidance != 1.0 and ("control" not in null or config.method.name != "denoise"):
        raise ValueError(
            f"sample.control_guidance={config.sample.control_guidance} needs a model of method 'denoise' that was "
            f"trained with cond.control_drop above 0; got method {config.method.name!r} and "
            f"{config.cond.control_drop}"
        )
    return null or None


def padding_of(config: ConfigDict, dataset: Dataset) -> Padding | None:
    """How texts are padded, where not by a mask."""
    c = config.cond
    if not c.padding:
        return None
    if not {"text", "text_mask"} <= set(dataset.null):
        raise ValueError(
            f"cond.padding={c.padding!r} fills up texts where text_mask says that there are none; {dataset.name} has "
            f"{', '.join(dataset.null) or 'no texts'}"
        )
    return conditioning.padding(c.padding, c.padding_noise)


def padded(method: Method, pad: Padding) -> Method:
    """The method with the texts of its batches padded: new noise at every step, always the same in samples."""

    def step(state: Any, batch: Any, key: Array) -> Any:
        keys = jax.random.split(jax.random.fold_in(key, 1), len(batch["text"]))
        return method.step(state, pad(batch, keys), key)

    def sampling(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(state: Any, noise: Array, cond: Cond = None, *rest: Any, **options: Any) -> Any:
            return call(state, noise, pad(cond, fixed_keys(len(noise))), *rest, **options)

        return run

    correct = None if method.correct is None else sampling(method.correct)
    return method._replace(step=step, sample=sampling(method.sample), correct=correct)


def fixed_keys(count: int) -> Array:
    """One key so many times: what is drawn with it does not depend on the batch."""
    return jnp.broadcast_to(jax.random.key(0), (count,))
