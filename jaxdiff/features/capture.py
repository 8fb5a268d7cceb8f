"""Activations of a network at a noise level: as they are (`capture`), or of clean images and reduced (`extract`).

    x = x0 + sigma eps(seed, image, draw);  f = activation(x, sigma);  out = project(pool(mean over draws of f))
    a scheduler's timestep t is the noise level sigma = sqrt((1 - alpha_bar[t]) / alpha_bar[t])

Only what the selected activations need is computed: selection happens inside the compiled program, with scanned blocks
unrolled. Results keep the order of execution, which a plain dict loses under jit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

from jaxdiff import flow_maps
from jaxdiff.conditions import signals_of
from jaxdiff.conventions import Convention, Flow
from jaxdiff.denoisers import Cond, Denoiser, Sigma, at_least_float32, per_example
from jaxdiff.errors import check_images, check_sigma, nearest
from jaxdiff.features.catalog import Tap, activations, describe
from jaxdiff.features.massive import modulated, modulation_of, stream_of
from jaxdiff.features.select import Patterns
from jaxdiff.features.select import select as matching
from jaxdiff.models import taps
from jaxdiff.trees import Params

Wrapper = Callable[..., Denoiser]  # a convention, or another function from networks to denoisers
Features = OrderedDict[str, Array]


def capture(
    model: nn.Module | Callable[..., Any],
    params: Params,
    x: Float[Array, "b h w c"],
    sigma: Sigma,
    cond: Cond = None,
    select: Patterns = "**",
    *,
    convention: Wrapper | None = None,
) -> Features:
    """The activations that `select` matches, for noisy images x, by name, in the network's own shapes.

    `model` is a Linen module, its `apply`, or a function called like it. `convention` wraps a network as a denoiser,
    which defines how sigma is encoded; the default is the published one. Under jit only what is selected is
    computed.
    """
    return OrderedDict((tap.name, value) for tap, value in _taps(model, params, x, sigma, cond, select, convention))


def sigma_of(timestep: float, convention: Convention) -> float:
    """The noise level of a timestep 0..999 of a DDPM schedule, or of a noise label of a flow.

    Schedulers may shift it: Meng et al. ask for t = 50, which PNDM (Stable Diffusion 1.5, steps_offset 1) makes 51.
    """
    if isinstance(convention, Flow):
        if not 0 < timestep < convention.time_scale:
            raise ValueError(f"a flow's timestep is between 0 and {convention.time_scale:g}, got {timestep}")
        rest = convention.time_scale - timestep
        return rest / timestep if convention.to_data else timestep / rest
    table = convention.sigmas
    if table is None:
        raise ValueError(f"{convention} has no timesteps; give sigma instead of timestep {timestep}")
    if timestep not in range(len(table)):
        raise ValueError(f"a timestep is an integer in 0..{len(table) - 1}, got {timestep}")
    return float(table[int(timestep)])


def _taps(
    model: nn.Module | Callable[..., Any],
    params: Params,
    x: Array,
    sigma: Sigma,
    cond: Cond,
    select: Patterns,
    convention: Wrapper | None,
    drop: Mapping[str, Sequence[int]] | None = None,
) -> list[tuple[Tap, Array]]:
    """Selected activations with their catalogue entries."""
    module = model if isinstance(model, nn.Module) else getattr(model, "__self__", None)
    convention = convention or _published(module, model)
    apply = model
    if isinstance(module, nn.Module):
        apply, params = taps.unrolled(module), taps.unstacked(module, params)
    seen: dict[str, Array] = {}

    def network(x: Array, label: Array, cond: Cond) -> Array:
        out, found = activations(apply, params, x, label, cond)
        seen.update(found)
        return out

    cond = flow_maps.on_diagonal(signals_of(module), cond, sigma, len(x))
    convention(network)(x, sigma, cond)
    names = matching(seen, select)
    kinds = {name: describe(name, value, x.shape).kind for name, value in seen.items()}
    found = {name: seen[name] for name in names}
    for name, channels in (drop or {}).items():
        if name not in found:
            raise ValueError(f"drop names {name!r}, which is not selected{nearest(name, names)}")
        found[name] = modulated(seen[stream_of(kinds, name)], seen[modulation_of(name)], channels)
    return [(describe(name, value, x.shape), value) for name, value in found.items()]


def _published(module: object, given: object) -> Wrapper:
    convention = getattr(module, "published", None)
    if convention is not None:
        return convention
    name = type(module).__name__ if isinstance(module, nn.Module) else repr(given)
    raise ValueError(f"{name} has no published convention; pass convention=, such as conventions.EDM()")


# ------------------------------------------------------------------------------------------ reduced features


class ExtractSpec(NamedTuple):
    """The static arguments of `extract`."""

    model: nn.Module
    select: tuple[str, ...]
    draws: int
    average: bool
    side: int
    dtype: DTypeLike | None
    convention: Wrapper | None
    drop: tuple[tuple[str, tuple[int, ...]], ...]


def extract(
    model: nn.Module,
    params: Params,
    x0: Float[Array, "b h w c"],
    seed: int | Array,
    sigma: Sigma,
    cond: Cond = None,
    select: Patterns = "**",
    *,
    index: ArrayLike | None = None,
    draws: int = 1,
    average: bool = True,
    side: int = 0,
    project: Mapping[str, tuple[ArrayLike, ArrayLike]] | None = None,
    dtype: DTypeLike | None = None,
    drop: Mapping[str, Sequence[int]] | None = None,
    convention: Wrapper | None = None,
) -> Features:
    """Features [b h w c] of clean images, by name, reduced inside one program per selection and shapes.

    Activations without a spatial grid (attention maps, text) are returned unreduced.

    Args:
        model: a network.
        params: its parameters.
        x0: clean images in [-1, 1].
        seed: the noise of image i is a function of (seed, index[i], draw).
        sigma: noise level, a scalar or one per image.
        cond: what the network is conditioned on.
        select: names or patterns, see `features.select`.
        index: numbers of the images; 0, 1, ... by default.
        draws: noise draws per image, averaged.
        average: with False, the draws are the first axis of the result.
        side: pools square patches so that no grid has a longer side; 0 disables pooling.
        project: {name: (mean [c], components [c k])}, for example of `fit_pca`.
        dtype: of the result.
        drop: {name of a transformer block's norm0: channels of its input that are set to 0}, see massive.py.
        convention: of the network, if not its published one.

    Returns:
        Name -> features.

    Raises:
        ValueError: a pattern matches nothing, or index does not fit the images.
    """
    check_sigma(sigma)
    if draws < 1 or side < 0:
        raise ValueError(f"extract needs draws >= 1 and side >= 0, got {draws=}, {side=}")
    check_images("x0, the images,", x0)
    x0 = at_least_float32(x0)
    index = jnp.arange(len(x0)) if index is None else jnp.asarray(index)
    if index.shape != x0.shape[:1]:
        raise ValueError(f"index holds one number per image, shape {x0.shape[:1]}, got shape {index.shape}")
    patterns = (select,) if isinstance(select, str) else tuple(select)
    kind = None if dtype is None else jnp.dtype(dtype)
    dropped = tuple((name, tuple(channels)) for name, channels in (drop or {}).items())
    spec = ExtractSpec(model, patterns, draws, average, side, kind, convention, dropped)
    return _extract(spec, params, x0, seed, sigma, cond, index, dict(project or {}))


@partial(jax.jit, static_argnums=0)
def _extract(
    spec: ExtractSpec,
    params: Params,
    x0: Array,
    seed: int | Array,
    sigma: Sigma,
    cond: Cond,
    index: Array,
    project: Mapping[str, tuple[ArrayLike, ArrayLike]],
) -> Features:
    def one(draw: int | Array) -> Features:
        x = x0 + per_example(sigma, x0) * noise(seed, index, x0.shape[1:], draw).astype(x0.dtype)
        found = _taps(spec.model, params, x, sigma, cond, spec.select, spec.convention, dict(spec.drop))
        names, sides = [tap.name for tap, _ in found], [max(tap.grid) for tap, _ in found if tap.grid]
        if sides and spec.side > max(sides):
            raise ValueError(
                f"side={spec.side} is longer than every selected grid, {max(sides)} at most: nothing would be pooled; "
                "0 means no pooling"
            )
        for name in set(project) - set(names):
            raise ValueError(f"project names {name!r}, which is not selected{nearest(name, names)}")
        return OrderedDict((tap.name, reduce(tap, value, spec.side, project.get(tap.name))) for tap, value in found)

    if spec.draws == 1 and spec.average:
        features = one(0)
    elif spec.average:
        start = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(one, 0))
        add = lambda total, draw: (jax.tree.map(jnp.add, total, one(draw)), None)  # noqa: E731
        features = jax.tree.map(lambda total: total / spec.draws, jax.lax.scan(add, start, jnp.arange(spec.draws))[0])
    else:
        features = jax.lax.map(one, jnp.arange(spec.draws))
    return jax.tree.map(lambda value: value.astype(spec.dtype or value.dtype), features)


def noise(seed: int | Array, index: ArrayLike, shape: Sequence[int], draw: int | Array = 0) -> Float[Array, "b ..."]:
    """The unit noise that `extract` adds to the images `index` [b]: each a function of (seed, its index, draw)."""
    key = jax.random.fold_in(jax.random.key(seed), draw)
    return jax.vmap(lambda i: jax.random.normal(jax.random.fold_in(key, i), tuple(shape)))(jnp.asarray(index))


def reduce(tap: Tap, value: Array, side: int = 0, project: tuple[ArrayLike, ArrayLike] | None = None) -> Array:
    """An activation over its grid [b h w c] in float32, averaged down to `side` and projected."""
    value = value.astype(jnp.float32)
    if tap.grid is None:
        if project is not None:
            raise ValueError(f"{tap.name} of shape {tap.shape} has no spatial grid and cannot be projected")
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
