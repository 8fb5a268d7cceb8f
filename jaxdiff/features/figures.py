"""Features as images: principal components as colours, scores over activation and noise level as a heat map."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

from jaxdiff.errors import optional_import
from jaxdiff.features.statistics import fit_pca
from jaxdiff.trees import AnyArray


def pca_images(f: Float[AnyArray, "n h w c"], size: tuple[int, int]) -> Float[np.ndarray, "n H W 3"]:
    """The three leading components as RGB in [-1, 1], one basis and scale for all images, nearest upsampling."""
    f = np.asarray(f, np.float32)
    mean, directions = fit_pca(f, min(3, f.shape[-1]))
    maps = (f - mean) @ directions
    low, high = np.percentile(maps, (1, 99), axis=(0, 1, 2))  # robust to outliers
    colours = np.clip(2 * (maps - low) / np.maximum(high - low, 1e-12) - 1, -1, 1)
    colours = np.pad(colours, ((0, 0),) * 3 + ((0, 3 - colours.shape[-1]),))
    rows, columns = (np.arange(side) * cells // side for side, cells in zip(size, f.shape[1:3], strict=True))
    return colours[:, rows][:, :, columns]


def load_figure_type() -> type:
    """Matplotlib's Figure; commands that plot load it before they compute anything."""
    return optional_import("matplotlib.figure", "drawing plots", "plots").Figure


def heat_map(
    path: str | os.PathLike, scores: Mapping[str, Sequence[float]], sigmas: Sequence[float], title: str
) -> None:
    """A PNG of scores {activation: one value per sigma}, in the given order; only some of many are labelled."""
    figure_type = load_figure_type()
    names, values = list(scores), np.asarray(list(scores.values()), float)
    figure = figure_type(figsize=(5 + 0.5 * len(sigmas), 2 + 0.13 * min(len(names), 150)))
    axes = figure.subplots()
    image = axes.imshow(values, aspect="auto", interpolation="nearest")
    shown = range(0, len(names), -(-len(names) // 150))
    axes.set_yticks(list(shown), [names[i] for i in shown], fontsize=6)
    axes.set_xticks(range(len(sigmas)), [f"{sigma:g}" for sigma in sigmas])
    axes.set_xlabel("sigma")
    axes.set_title(title)
    figure.colorbar(image)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
