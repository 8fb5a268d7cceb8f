"""Import and export of public checkpoints: strict name maps between released weights and our models."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import Array

from jaxdiff.conditions import SEMANTIC, signals_of
from jaxdiff.denoisers import Cond, Denoiser, Sigma
from jaxdiff.errors import pick
from jaxdiff.models import bind, check_fields, taps
from jaxdiff.models.low_rank import Adapters
from jaxdiff.models.stacks import stack_blocks
from jaxdiff.trees import Params
from jaxdiff.weights import (
    clip,
    dinov2,
    dit,
    edm,
    edm2,
    efficientnet,
    files,
    flux,
    inception,
    lora,
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
    "edm2": edm2.KIND,
    "dit": dit.KIND,
    "sit": dit.SIT,
    "mdt": mdt.KIND,
    "pixart": pixart.KIND,
    "sd3": sd3.KIND,
    "flux": flux.KIND,
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
    "dinov2": dinov2.KIND,
    "lpips": lpips.KIND,
}

__all__ = ["KINDS", "WeightsError", "load", "load_denoiser", "lora_kind", "save", "save_lora"]


def load(source: Source, kind: str, **overrides: Any) -> tuple[nn.Module, Params]:
    """The model and its float32 parameters, for `model.apply({"params": params}, x, noise_label, cond)`.

    Feature networks are called with images alone, see `jaxdiff.evaluation.feature_net`; LPIPS with two batches of them.

    Args:
        source: an .npz, .safetensors or Flax .msgpack file, its URL (gs://, s3://, hf://owner/repo/file), or a dict of
            arrays.
        kind: a name in `weights.KINDS`.
        overrides: fields that names and shapes do not determine (heads), and how it runs (dtype, remat, scan, dropout).

    Returns:
        (model, params).

    Raises:
        WeightsError: an array is missing, unexpected or mis-shaped, or a field is not determined.
    """
    rules = pick(KINDS, kind, "weights kind")
    arrays = rules.renamed(files.read(source))
    rules = rules.named(arrays) if rules.named else rules
    check_fields(rules.model, overrides)
    fields = {**rules.infer(arrays), **overrides}
    unknown = [field for field, value in fields.items() if value is None]
    if unknown:
        raise WeightsError(
            f"names and shapes of this {kind!r} checkpoint do not determine {', '.join(unknown)}; "
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

    It is a pytree that carries its parameters: pass it to jitted functions as an argument,
    `jax.jit(solve_it)(denoise, x)`, so that weights do not become constants of the program.
    """
    rules = pick(KINDS, kind, "weights kind")
    if not rules.conventions:
        denoisers = ", ".join(name for name, other in KINDS.items() if other.conventions)
        raise ValueError(
            f"kind {kind!r} is a {rules.model.__name__}, which is not a denoiser; use load(), or one of {denoisers}"
        )
    wrap = rules.conventions[0]
    model, params = load(source, kind, **overrides)

    def denoise(params: Params, x: Array, sigma: Sigma, cond: Cond = None) -> Array:
        return wrap(bind(model, params))(x, sigma, cond)

    return jax.tree_util.Partial(denoise, params)


def save(model: nn.Module, params: Params, kind: str, path: str | os.PathLike | None = None) -> dict[str, np.ndarray]:
    """The arrays under their public names, written to `path` (`.npz` or `.safetensors`) when given; inverts `load`."""
    rules = pick(KINDS, kind, "weights kind")
    if not isinstance(model, rules.model):
        raise ValueError(f"kind {kind!r} describes a {rules.model.__name__}, got a {type(model).__name__}")
    params = taps.unstacked(model, params)
    arrays = {**names.to_public(params, rules.entries(model, _abstract(rules, model))), **rules.constants(model)}
    if path is not None:
        files.write(path, arrays)
    return arrays


def save_lora(
    model: nn.Module, adapters: Adapters, kind: str, path: str | os.PathLike | None = None
) -> dict[str, np.ndarray]:
    """Low-rank updates as the diffusers library stores them, written to `path` when given; see `lora`."""
    rules, component = KINDS[kind], pick(lora.COMPONENTS, kind, "kind with the names of diffusers")
    if not isinstance(model, rules.model):
        raise ValueError(f"kind {kind!r} describes a {rules.model.__name__}, got a {type(model).__name__}")
    adapters = adapters.replace(low=taps.unstacked(model, adapters.low))  # type: ignore[attr-defined]
    arrays = lora.arrays_of(adapters, rules.entries(model, _abstract(rules, model)), f"{component}.")
    if path is not None:
        files.write(path, arrays)
    return arrays


def lora_kind(model: nn.Module, kind: str = "") -> str:
    """The kind with the names of diffusers that a network belongs to: `kind` if it is one, "" if there is none."""
    found = [name for name in lora.COMPONENTS if KINDS[name].model is type(model)]
    if kind in found or not found:
        return kind if found else ""
    return found[0]


def _abstract(rules: Kind, model: nn.Module) -> Params:
    """Shapes of the model's parameters, blocks unrolled, without computing anything."""
    if getattr(model, "scalars", ()):
        raise ValueError(
            f"public weights have no embedding of scalars={tuple(model.scalars)}; load them without, and start a "
            "student of model.clone(scalars=...) from them, which is the same function until it is trained"
        )
    model = model.clone(scan=False) if hasattr(model, "scan") else model
    arguments = rules.example(model) if rules.example else _diffusion_example(model)
    return jax.eval_shape(lambda: model.init(jax.random.key(0), *arguments))["params"]


def _diffusion_example(model: nn.Module) -> tuple:
    """The smallest (x, noise_label, cond) a diffusion network takes."""
    side = getattr(model, "patch", 1) * 2 ** len(getattr(model, "channel_mult", ()))
    cond = {
        name: jnp.zeros(signal.batch_shape(1), signal.dtype)
        for name, signal in signals_of(model).items()
        if signal.required or signal.group != SEMANTIC
    }
    return jnp.zeros((1, side, side, model.channels)), jnp.zeros(1), cond or None


def _stacks(params: Params) -> Counter[str]:
    """The number of blocks, {name}_0 and so on, of each stack."""
    return Counter(name.rsplit("_", 1)[0] for name in params if name.rsplit("_", 1)[-1].isdigit())
