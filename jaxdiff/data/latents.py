"""Precomputed latents as data: `jaxdiff.autoencoders.write` stores them with their scale and shift."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from jaxdiff.data.examples import Source
from jaxdiff.data.memory import in_memory
from jaxdiff.files import read_npz


def latents(path: str | os.PathLike) -> Source:
    """An .npz file with `latents` [n k l z], `scale` and `shift`; labels and captions as for the source `arrays`.

    Latents are z = scale (encoder output - shift), as diffusion models see them. They are neither cropped nor flipped,
    so encode flipped images too.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"no latents at {file}; tried {file.resolve()}; autoencoders.write creates them")
    arrays = read_npz(file)
    missing = [name for name in ("latents", "scale", "shift") if name not in arrays]
    if missing:
        raise ValueError(
            f"{file} has keys {', '.join(arrays)}, but {', '.join(missing)} are needed: "
            "jaxdiff.autoencoders.write stores latents with the scale and shift of their autoencoder"
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
    return source._replace(latent=(float(arrays["scale"]), float(arrays["shift"])))
