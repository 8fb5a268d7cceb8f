"""Text padded with copies of its own tokens instead of a mask: `cond.padding`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from ml_collections import ConfigDict

from jaxdiff.conditions import Cond, Conditions
from jaxdiff.methods import Method
from jaxdiff.methods.method import Batch
from jaxdiff.models import padding
from jaxdiff.models.padding import Padding
from jaxdiff.trees import Tree


def of(config: ConfigDict, conditions: Conditions, data: str) -> Padding | None:
    """How text is padded; None if a mask hides the padding."""
    c = config.cond
    if not c.padding:
        return None
    if not {"text", "text_mask"} <= set(conditions):
        raise ValueError(
            f"cond.padding={c.padding!r} needs the signals text and text_mask; {data} with this network has "
            f"{', '.join(conditions) or 'none'}; set cond.padding=''"
        )
    return padding.padding(c.padding, c.padding_noise)


def without_mask(conditions: Conditions, pad: Padding) -> Conditions:
    """The signals with padded text: no mask, and the null text padded too."""
    null = {name: conditions[name].null for name in ("text", "text_mask")}
    padded = pad(jax.tree.map(lambda a: jnp.asarray(a)[None], null), fixed_keys(1))
    kept = Conditions({name: signal for name, signal in conditions.items() if name != "text_mask"})
    kept["text"] = replace(kept["text"], null=padded["text"][0])
    return kept


def padded(method: Method, pad: Padding) -> Method:
    """The method with padded text: fresh noise at every training step, fixed noise when sampling."""

    def step(state: Tree, batch: Batch, key: Array) -> Tree:
        keys = jax.random.split(jax.random.fold_in(key, 1), len(batch["text"]))
        return method.step(state, pad(batch, keys), key)

    def sampling(call: Callable[..., Tree]) -> Callable[..., Tree]:
        def run(source: Tree, noise: Array, cond: Cond = None, *rest: Any, **options: Any) -> Tree:
            return call(source, noise, pad(cond, fixed_keys(len(noise))), *rest, **options)

        return run

    correct = None if method.correct is None else sampling(method.correct)
    return method._replace(step=step, sample=sampling(method.sample), correct=correct)


def fixed_keys(count: int) -> Array:
    """One key repeated `count` times, so that draws do not depend on the batch."""
    return jnp.broadcast_to(jax.random.key(0), (count,))
