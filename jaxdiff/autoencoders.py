"""Images to latents and back, through an autoencoder of `jaxdiff.models`, in batches of one shape.

model, params = weights.load("vae.safetensors", "sd_vae")
latents = encode(model, params, images, key=jax.random.key(0))   # once, before training
write("latents.npz", latents, model, labels=labels)              # which data.source = "latents" reads
images = decode(model, params, solvers.solve(...))               # after sampling
decoder(config, dataset)                                         # what a run calls on its samples
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float32
from ml_collections import ConfigDict
from numpy.typing import ArrayLike

from jaxdiff import weights
from jaxdiff.data import DataSpec
from jaxdiff.data.examples import to_float
from jaxdiff.errors import choose
from jaxdiff.files import replacing
from jaxdiff.remote import local
from jaxdiff.trees import AnyArray, Params

AUTOENCODERS = ("sd_vae", "sdxl_vae", "taesd")  # kinds of weights that decode latents
COLUMNS = ("labels", "class_names", "caption_ids", "captions")  # of a file of latents


def encode(
    model: nn.Module, params: Params, images: AnyArray, *, batch_size: int = 16, key: Array | None = None
) -> Float32[np.ndarray, "n k l z"]:
    """Latents on the host of images [n h w c], uint8 or in [-1, 1].

    The posterior mode, or with a key a sample of the posterior; that of image i depends on (key, i) alone.
    """
    keys = None if key is None else jax.vmap(partial(jax.random.fold_in, key))(np.arange(len(images)))
    return _in_batches("encode", model, params, images, keys, batch_size)


def decode(
    model: nn.Module, params: Params, latents: AnyArray, *, batch_size: int = 16
) -> Float32[np.ndarray, "n h w c"]:
    """Images on the host, clipped to [-1, 1], of latents [n k l z]."""
    return _in_batches("decode", model, params, latents, None, batch_size).clip(-1, 1)


def write(path: str | os.PathLike, latents: AnyArray, model: nn.Module, **columns: ArrayLike) -> None:
    """Latents of `model` with their scale and shift, and any of labels, class_names, caption_ids, captions; an .npz."""
    for name in columns:
        choose(name, COLUMNS, "column of latents")
    scale, shift = units(model)
    arrays: dict[str, Any] = {
        "latents": np.asarray(latents, np.float32),
        "scale": scale,
        "shift": shift,
        **columns,
    }
    with replacing(path) as unfinished:
        np.savez(unfinished, **arrays)


def units(model: nn.Module) -> tuple[float, float]:
    """The scale and shift of an autoencoder's latents; TAESD's latents are already scaled."""
    return float(getattr(model, "scale", 1.0)), float(getattr(model, "shift", 0.0))


def loader(config: ConfigDict, data: DataSpec) -> Callable[[], tuple[nn.Module, Params]] | None:
    """Reads the autoencoder of config.autoencoder at the first call, and checks that the data are its latents.

    None if the config names no autoencoder.
    """
    c = config.autoencoder
    if not c.kind:
        return None
    choose(c.kind, AUTOENCODERS, "autoencoder kind")
    file = local(c.path)

    @cache
    def loaded() -> tuple[nn.Module, Params]:
        model, params = weights.load(file, c.kind, **dict(c.options.items()))
        stored = data.latent or units(model)
        if model.channels != data.shape[-1] or stored != units(model):
            raise ValueError(
                f"{c.path} is not the autoencoder of {data.name}: it decodes {model.channels} channels with "
                f"(scale, shift) = {units(model)}, the latents have {data.shape[-1]} with {stored}"
            )
        return model, params

    return loaded


def decoder(config: ConfigDict, data: DataSpec) -> Callable[[AnyArray], np.ndarray] | None:
    """Latents to images by the autoencoder of the config; None if it names none: samples stay latents."""
    loaded = loader(config, data)
    return None if loaded is None else lambda z: decode(*loaded(), z)


def check_files(config: ConfigDict) -> None:
    """Raise if the autoencoder's weights are missing, before anything is computed."""
    c = config.autoencoder
    if c.kind and not local(c.path).is_file():
        raise FileNotFoundError(
            f"no autoencoder weights at {c.path!r}: give --config.autoencoder.path=FILE (docs/weights.md says "
            "where to get them), or --config.autoencoder.kind= to leave samples as latents"
        )


def _in_batches(
    method: str, model: nn.Module, params: Params, inputs: AnyArray, keys: Array | None, size: int
) -> np.ndarray:
    """The last batch is padded with its first input, so that all have one shape."""
    if not len(inputs) or size < 1:
        raise ValueError(f"nothing to {method}: got {len(inputs)} inputs in batches of {size}")
    out = []
    for start in range(0, len(inputs), size):
        part = np.arange(start, start + size)
        part = np.where(part < len(inputs), part, start)
        x = jnp.asarray(to_float(np.asarray(inputs[part])))
        out.append(np.asarray(_run(method, model, params, x, None if keys is None else keys[part])))
    return np.concatenate(out)[: len(inputs)]


@partial(jax.jit, static_argnames=("method", "model"))
def _run(method: str, model: nn.Module, params: Params, x: Array, keys: Array | None) -> Array:
    more = () if keys is None else (keys,)
    return jnp.asarray(model.apply({"params": params}, x, *more, method=method))
