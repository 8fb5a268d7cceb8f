"""Activations of a network at a noise level: as they are (`capture`), or of clean images and reduced (`extract`).

    x = x0 + sigma eps(seed, image, draw);  f = activation(x, sigma);  out = project(pool(mean over draws of f))

What no selected activation needs is not computed: selection happens inside the compiled program, and scanned blocks are
unrolled for it. Results keep the order of execution, which compiled functions would lose with a plain dict.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jaxdiff import denoisers, models
from jaxdiff.denoisers import Cond, Denoiser, Sigma, at_least_float32, per_example
from jaxdiff.errors import check_sigma, nearest
from jaxdiff.features.catalog import Tap, activations, describe, unrolled
from jaxdiff.features.select import Patterns
from jaxdiff.features.select import select as choose
from jaxdiff.models import layers

Wrapper = Callable[..., Denoiser]
Features = OrderedDict[str, Array]


def _ddpm(network: Any) -> Denoiser:
    return denoisers.ddpm(network, denoisers.linear_abar())


def _latent(network: Any) -> Denoiser:
    return denoisers.ddpm(network, denoisers.sqrt_linear_abar())


# how each network was published to be told its noise level; for others `wrapper` says it
WRAPPERS: dict[type[nn.Module], Wrapper] = {
    models.UNet: denoisers.edm,
    models.DiT: _ddpm,
    models.MDT: _ddpm,
    models.PixArt: _ddpm,
    models.LatentUNet: _latent,
    models.MMDiT: denoisers.flow,
}


def capture(
    model: Any,
    params: Any,
    x: Float[Array, "b h w c"],
    sigma: Sigma,
    cond: Cond = None,
    select: Patterns = "**",
    *,
    wrapper: Wrapper | None = None,
) -> Features:
    """The activations that `select` names, for noisy images x, by name, shaped as the network holds them.

    `model` is a Linen module, its `apply`, or a function called like it. `wrapper` makes a network a denoiser and so
    says how it is told sigma; the default is how it was published (`WRAPPERS`). Called inside jit, what is not selected
    is not computed.
    """
    return OrderedDict((tap.name, value) for tap, value in _taps(model, params, x, sigma, cond, select, wrapper))


def _taps(
    model: Any, params: Any, x: Array, sigma: Any, cond: Cond, select: Patterns, wrapper: Wrapper | None
) -> list[tuple[Tap, Array]]:
    """Selected activations with what the catalogue knows of them."""
    module = model if isinstance(model, nn.Module) else getattr(model, "__self__", None)
    wrapper = wrapper or _wrapper(module, model)
    apply = unrolled(module) if isinstance(module, nn.Module) else model
    if getattr(module, "scan", False):
        params = _unstacked(params)
    seen: dict[str, Any] = {}

    def network(x: Array, label: Array, cond: Cond) -> Array:
        out, taps = activations(apply, params, x, label, cond)
        seen.update(taps)
        return out

    wrapper(network)(x, sigma, cond)
    return [(describe(name, seen[name], x.shape), seen[name]) for name in choose(seen, select)]


def _wrapper(module: Any, given: Any) -> Wrapper:
    if type(module) in WRAPPERS:
        return WRAPPERS[type(module)]
    known = ", ".join(model.__name__ for model in WRAPPERS)
    name = type(module).__name__ if isinstance(module, nn.Module) else repr(given)
    raise ValueError(f"how {name} is told sigma is known for {known} only; pass wrapper=, such as denoisers.edm")


def _unstacked(params: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in [name for name, value in params.items() if isinstance(value, Mapping) and set(value) == {"block"}]:
        params = layers.unstack_blocks(params, name)
    return params


# ------------------------------------------------------------------------------------------ reduced features


class Plan(NamedTuple):
    """What is fixed when `extract` is compiled."""

    model: nn.Module
    select: tuple[str, ...]
    draws: int
    average: bool
    side: int
    dtype: Any
    wrapper: Wrapper | None


def extract(
    model: nn.Module,
    params: Any,
    x0: Float[Array, "b h w c"],
    seed: Any,
    sigma: Sigma,
    cond: Cond = None,
    select: Patterns = "**",
    *,
    index: Any = None,
    draws: int = 1,
    average: bool = True,
    side: int = 0,
    project: Mapping[str, tuple[Any, Any]] | None = None,
    dtype: Any = None,
    wrapper: Wrapper | None = None,
) -> Features:
    """Features [b h w c] of clean images, by name, reduced inside one program per selection and shapes.

    seed, index  the noise of image i is a function of (seed, index[i], draw); index counts from 0 by default
    draws        noise draws per image, averaged; with average=False they are the first axis of the result
    side         averages square patches so that no grid has a longer side; 0 leaves grids as they are
    project      {name: (mean [c], components [c k])}, for example of `fit_pca`
    dtype        of the result
    Activations that do not lie over the image (attention maps, text) come as the network holds them.
    """
    check_sigma(sigma)
    if draws < 1 or side < 0:
        raise ValueError(f"extract needs draws >= 1 and side >= 0, got {draws=}, {side=}")
    x0 = at_least_float32(x0)
    index = jnp.arange(len(x0)) if index is None else jnp.asarray(index)
    if index.shape != x0.shape[:1]:
        raise ValueError(f"index holds one number per image, shape {x0.shape[:1]}, got shape {index.shape}")
    patterns = (select,) if isinstance(select, str) else tuple(select)
    plan = Plan(model, patterns, draws, average, side, None if dtype is None else jnp.dtype(dtype), wrapper)
    return _extract(plan, params, x0, seed, sigma, cond, index, dict(project or {}))


@partial(jax.jit, static_argnums=0)
def _extract(
    plan: Plan, params: Any, x0: Array, seed: Any, sigma: Any, cond: Cond, index: Array, project: Mapping[str, Any]
) -> Features:
    def one(draw: Any) -> Features:
        x = x0 + per_example(sigma, x0) * noise(seed, index, x0.shape[1:], draw).astype(x0.dtype)
        taps = _taps(plan.model, params, x, sigma, cond, plan.select, plan.wrapper)
        for name in set(project) - {tap.name for tap, _ in taps}:
            raise ValueError(f"project names {name!r}, which is not selected{nearest(name, [t.name for t, _ in taps])}")
        return OrderedDict((tap.name, reduce(tap, value, plan.side, project.get(tap.name))) for tap, value in taps)

    if plan.draws == 1 and plan.average:
        features = one(0)
    elif plan.average:
        start = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(one, 0))
        add = lambda total, draw: (jax.tree.map(jnp.add, total, one(draw)), None)  # noqa: E731
        features = jax.tree.map(lambda total: total / plan.draws, jax.lax.scan(add, start, jnp.arange(plan.draws))[0])
    else:
        features = jax.lax.map(one, jnp.arange(plan.draws))
    return jax.tree.map(lambda value: value.astype(plan.dtype or value.dtype), features)


def noise(seed: Any, index: Any, shape: Sequence[int], draw: Any = 0) -> Float[Array, "b ..."]:
    """The unit noise that `extract` adds to the images `index` [b]: each a function of (seed, its index, draw)."""
    key = jax.random.fold_in(jax.random.key(seed), draw)
    return jax.vmap(lambda i: jax.random.normal(jax.random.fold_in(key, i), tuple(shape)))(jnp.asarray(index))


def reduce(tap: Tap, value: Array, side: int = 0, project: tuple[Any, Any] | None = None) -> Array:
    """An activation over its grid [b h w c] in float32, averaged down to `side` and projected."""
    value = value.astype(jnp.float32)
    if tap.grid is None:
        if project is not None:
            raise ValueError(f"{tap.name} of shape {tap.shape} does not lie over the image and cannot be projected")
        return value
    value = value.reshape(value.shape[0], *tap.grid, value.shape[-1])
    if side:
        value = _pool(value, _patch(tap, side))
    if project is not None:
        mean, components = (jnp.asarray(part, jnp.float32) for part in project)
        value = (value - mean) @ components
    return value


def _patch(tap: Tap, side: int) -> int:
    """The smallest patch that divides the grid into at most side x side."""
    height, width = tap.grid or (1, 1)
    longest = max(height, width)
    fits = [p for p in range(1, longest + 1) if not height % p and not width % p and longest <= side * p]
    if not fits:
        raise ValueError(f"the {height}x{width} grid of {tap.name} has no square patches that leave side <= {side}")
    return fits[0]


def _pool(x: Float[Array, "b h w c"], patch: int) -> Float[Array, "b k l c"]:
    b, height, width, c = x.shape
    return x.reshape(b, height // patch, patch, width // patch, patch, c).mean((2, 4))
