"""Public checkpoints in and out: strict name maps between released weights and our models."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxdiff.denoisers import Denoiser
from jaxdiff.errors import pick
from jaxdiff.models import check_fields, network
from jaxdiff.models.layers import stack_blocks, unstack_blocks
from jaxdiff.weights import (
    clip,
    dit,
    edm,
    efficientnet,
    files,
    inception,
    lpips,
    mdt,
    names,
    pixart,
    sd3,
    sd_unet,
    sd_vae,
    t5,
    taesd,
)
from jaxdiff.weights.files import Source
from jaxdiff.weights.names import Kind, WeightsError

KINDS: dict[str, Kind] = {
    "edm": edm.KIND,
    "dit": dit.KIND,
    "mdt": mdt.KIND,
    "pixart": pixart.KIND,
    "sd3": sd3.KIND,
    "sd_unet": sd_unet.SD,
    "sdxl_unet": sd_unet.SDXL,
    "sd_vae": sd_vae.SD,
    "sdxl_vae": sd_vae.SDXL,
    "taesd": taesd.KIND,
    "clip_text": clip.CLIP_TEXT,
    "clip_vision": clip.CLIP_VISION,
    "t5": t5.KIND,
    "inception": inception.KIND,
    "efficientnet_lite0": efficientnet.KIND,
    "lpips": lpips.KIND,
}

__all__ = ["KINDS", "WeightsError", "load", "load_denoiser", "save"]


def load(source: Source, kind: str, **overrides: Any) -> tuple[nn.Module, dict[str, Any]]:
    """The model and its float32 parameters, for `model.apply({"params": params}, x, noise_label, cond)`.

    Feature networks are called with images alone, see `jaxdiff.evaluation.feature_net`; LPIPS with two batches of them.
    The architecture is read from names and shapes; `overrides` set what they cannot tell (heads) and how it
    runs (dtype, remat, scan, dropout). Every missing, unexpected or mis-shaped array is an error.
    """
    rules = pick(KINDS, kind, "weights kind")
    arrays = files.read(source)
    rules = rules.named(arrays) if rules.named else rules
    check_fields(rules.model, overrides)
    fields = {**rules.infer(arrays), **overrides}
    unknown = [field for field, value in fields.items() if value is None]
    if unknown:
        raise WeightsError(
            f"names and shapes of this {kind!r} checkpoint do not tell {', '.join(unknown)}; "
            f"pass load(..., {unknown[0]}=...)"
        )
    model = rules.model(**fields)
    params = names.to_params(kind, rules, model, _abstract(rules, model), arrays)
    if getattr(model, "scan", False):
        for name, depth in _stacks(params).items():
            params = stack_blocks(params, depth, name)
    return model, jax.tree.map(jnp.asarray, params)


def load_denoiser(source: Source, kind: str, **overrides: Any) -> Denoiser:
    """A denoiser from public weights, in the convention they were trained in.

    It is a pytree that carries its parameters: hand it to a jitted function as an argument,
    `jax.jit(solve_it)(denoise, x)`, so that large weights do not become constants of the program.
    """
    rules = pick(KINDS, kind, "weights kind")
    if rules.denoiser is None:
        denoising = ", ".join(name for name, other in KINDS.items() if other.denoiser is not None)
        raise ValueError(
            f"kind {kind!r} is a network of type {rules.model.__name__}, which does not denoise; "
            f"use load(), or a kind among {denoising}"
        )
    wrap = rules.denoiser
    model, params = load(source, kind, **overrides)

    def denoise(params: Any, x: Any, sigma: Any, cond: Any = None) -> Any:
        return wrap(network(model, params))(x, sigma, cond)

    return jax.tree_util.Partial(denoise, params)


def save(model: nn.Module, params: Any, kind: str, path: str | os.PathLike | None = None) -> dict[str, np.ndarray]:
    """The arrays under their public names, written to `path` (`.npz` or `.safetensors`) when given."""
    rules = pick(KINDS, kind, "weights kind")
    if not isinstance(model, rules.model):
        raise ValueError(f"kind {kind!r} describes a {rules.model.__name__}, got a {type(model).__name__}")
    if getattr(model, "scan", False):
        for name in [name for name, value in params.items() if isinstance(value, Mapping) and [*value] == ["block"]]:
            params = unstack_blocks(params, name)
    arrays = {**names.to_public(params, rules.entries(model, _abstract(rules, model))), **rules.constants(model)}
    if path is not None:
        files.write(path, arrays)
    return arrays


def _abstract(rules: Kind, model: nn.Module) -> Any:
    """Shapes of the model's parameters, blocks unrolled, without computing anything."""
    model = model.clone(scan=False) if hasattr(model, "scan") else model
    arguments = rules.example(model) if rules.example else _diffusion_example(rules, model)
    return jax.eval_shape(lambda: model.init(jax.random.key(0), *arguments))["params"]


def _diffusion_example(rules: Kind, model: nn.Module) -> tuple:
    """The smallest (x, noise_label, cond) a diffusion network takes."""
    side = getattr(model, "patch", 2 ** len(getattr(model, "multipliers", ())))
    return jnp.zeros((1, side, side, model.channels)), jnp.zeros(1), rules.cond(model)


def _stacks(params: dict[str, Any]) -> Counter[str]:
    """How many blocks, {name}_0 and on, each stack has."""
    return Counter(name.rsplit("_", 1)[0] for name in params if name.rsplit("_", 1)[-1].isdigit())
