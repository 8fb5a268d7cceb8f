"""Latents made once by an autoencoder, as data: `jaxdiff.latents.write` stores them with the units they are in."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from jaxdiff.data.examples import Source
from jaxdiff.data.memory import in_memory


def latents(path: str | os.PathLike) -> Source:
    """An .npz file with `latents` [n k l z], `scale` and `shift`; labels and captions as for the source `arrays`.

    Latents are z = scale (stored by the network - shift), as diffusion models see them. They are no pictures: nothing
    is cut or mirrored, so encode the mirror images too.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"no latents at {file}; tried {file.resolve()}: jaxdiff.latents.write makes them")
    with np.load(file, allow_pickle=False) as stored:
        arrays = {name: stored[name] for name in stored.files}
    missing = [name for name in ("latents", "scale", "shift") if name not in arrays]
    if missing:
        raise ValueError(
            f"{file} has keys {', '.join(arrays)}, but {', '.join(missing)} are needed: jaxdiff.latents.write stores "
            "latents with the scale and shift of their autoencoder"
        )
    z = arrays["latents"]
    if z.ndim != 4 or not np.issubdtype(z.dtype, np.floating) or not np.isfinite(z).all():
        raise ValueError(f"latents must be finite floats [n k l z], got {z.dtype} of shape {z.shape} in {file}")
    source = in_memory(
        f"latents/{file.stem}",
        z,
        arrays.get("labels"),
        class_names=tuple(map(str, arrays.get("class_names", ()))),
        caption_ids=arrays.get("caption_ids"),
        captions=tuple(map(str, arrays.get("captions", ()))),
    )
    return source._replace(latent={name: float(arrays[name]) for name in ("scale", "shift")})
