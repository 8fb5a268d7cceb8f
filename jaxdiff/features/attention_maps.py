"""Cross-attention maps of a UNet's stage as one dense activation, as in VPD (Zhao et al. 2023) and Meng et al. (2024).

    A_s [b h w tokens] = mean over layers with a grid of size s of (mean over heads of their maps)
    up/cross_maps      = A_s for every grid size s between 1/4 and 1/2 of the input's, in order of execution,
                         resized to the input's grid (nearest), concatenated

For latents at 1/8 of the image size these are the grids of 1/32 to 1/16 of the image: 2 x 77 channels in SD 1.5.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import Array

LAYER = re.compile(r"(down|mid|up)\w*/.*cross_attention/map")
NAME = "cross_maps"  # after the stage


def aggregated(taps: Mapping[str, Array], image: tuple[int, ...]) -> dict[str, Array]:
    """{stage/cross_maps: [b h w c]} of the activations of a network that was given images of shape [b h w c]."""
    height, width = image[1:3]
    groups: dict[str, dict[int, list[Array]]] = {}
    for name, value in taps.items():
        layer = LAYER.fullmatch(name)
        for step in (2, 4):  # of this grid, in pixels of the input
            if layer and value.shape[2] * step**2 == height * width:
                groups.setdefault(layer[1], {}).setdefault(step, []).append(value.mean(1))
    found = {}
    for stage, sizes in groups.items():
        grids = [_over_image(jnp.stack(maps).mean(0), height, width, step) for step, maps in sizes.items()]
        found[f"{stage}/{NAME}"] = jnp.concatenate(grids, axis=-1)
    return found


def _over_image(maps: Array, height: int, width: int, step: int) -> Array:
    grid = maps.reshape(len(maps), height // step, width // step, -1)
    return jax.image.resize(grid, (len(maps), height, width, maps.shape[-1]), "nearest")
