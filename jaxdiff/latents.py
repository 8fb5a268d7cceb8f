"""Sets of images to latents and back, through an autoencoder of `jaxdiff.models`, in batches of one compiled program.

model, params = weights.load("vae.safetensors", "sd_vae")
latents = encode(model, params, images, key=jax.random.key(0))   # once, before training
write("latents.npz", latents, model, labels=labels)              # which data.source = "latents" reads
images = decode(model, params, solvers.solve(...))               # after sampling
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float32

from jaxdiff.data.examples import to_float
from jaxdiff.errors import pick


def encode(
    model: nn.Module, params: Any, images: Any, *, batch_size: int = 16, key: Array | None = None
) -> Float32[np.ndarray, "n k l z"]:
    """Latents on the host of images [n h w c], uint8 or in [-1, 1].

    They are the most likely ones, or with a key drawn from the posterior; that of image i depends on (key, i) alone.
    """
    keys = None if key is None else jax.vmap(partial(jax.random.fold_in, key))(np.arange(len(images)))
    return _in_batches("encode", model, params, images, keys, batch_size)


def decode(model: nn.Module, params: Any, latents: Any, *, batch_size: int = 16) -> Float32[np.ndarray, "n h w c"]:
    """Images on the host, clipped to [-1, 1], of latents [n k l z]."""
    return _in_batches("decode", model, params, latents, None, batch_size).clip(-1, 1)


def write(path: str | os.PathLike, latents: Any, model: nn.Module, **columns: Any) -> None:
    """Latents of `model` with their scale and shift, and any of labels, class_names, caption_ids, captions; an .npz."""
    known = ("labels", "class_names", "caption_ids", "captions")
    for name in columns:
        pick(dict.fromkeys(known), name, "column of latents")
    arrays: dict[str, Any] = {"latents": np.asarray(latents, np.float32), **units(model), **columns}
    np.savez(path, **arrays)


def units(model: nn.Module) -> dict[str, float]:
    """The scale and shift of an autoencoder's latents; TAESD's are made as diffusion models see them."""
    return {"scale": float(getattr(model, "scale", 1.0)), "shift": float(getattr(model, "shift", 0.0))}


def _in_batches(method: str, model: nn.Module, params: Any, inputs: Any, keys: Any, size: int) -> np.ndarray:
    """The last batch is filled up with its first input, so that all have one shape."""
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
def _run(method: str, model: nn.Module, params: Any, x: Array, keys: Any) -> Any:
    more = () if keys is None else (keys,)
    return model.apply({"params": params}, x, *more, method=method)
