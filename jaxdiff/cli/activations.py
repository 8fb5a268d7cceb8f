"""What `jaxdiff features catalog | extract | score | show` do, from a run or public weights to tables and files.

Each is a function of the config and the run's folder, "" for the weights of `train.init_from`; its other arguments are
the command's flags.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from jaxdiff.cli import runs
from jaxdiff.conventions import Convention
from jaxdiff.data.examples import Batch
from jaxdiff.errors import check_sigma, pick
from jaxdiff.features import scoring, store
from jaxdiff.features.capture import sigma_of
from jaxdiff.features.catalog import Catalog
from jaxdiff.features.figures import heat_map, load_figure_type, pca_images
from jaxdiff.features.reference import SELECTIONS, reference_names
from jaxdiff.features.scoring import Subject
from jaxdiff.features.select import load_selection
from jaxdiff.features.select import select as choose

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
COLUMNS = ("name", "kind", "stage", "shape", "grid", "order", "operations")


def catalog(config: ConfigDict, workdir: str, *, select: str, out: str) -> None:
    """Print the activations, with the FLOPs to reach each for one image; --out=FILE.csv writes them too."""
    if out:
        _check_new(Path(out))
    run = runs.build(config, workdir)
    table = runs.table_of(run)
    names, theirs = _chosen(table, select, dense=False), {ours: name for name, ours in reference_names(table).items()}
    columns = [*COLUMNS, *(["reference"] if theirs else [])]
    rows = [[*map(str, _row(table, name)), *([theirs.get(name, "-")] if theirs else [])] for name in names]
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for row in [columns, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(
        f"{len(rows)} of {len(table)} activations of {type(run.model).__name__}; maps and modulations by pattern only"
    )
    if out:
        _write_csv(out, columns, rows)


def extract(
    config: ConfigDict,
    workdir: str,
    *,
    images: str,
    select: str,
    sigma: float,
    timestep: int,
    prompt: str,
    drop_massive: float,
    out: str,
    count: int,
    seed: int,
    draws: int,
    side: int,
    dtype: str,
    shard: int,
) -> None:
    """Write features of the first `count` images (0: all), in stored order, as shards in the folder --out."""
    if not out or (Path(out).exists() and any(Path(out).iterdir())):
        raise ValueError(f"extract writes to a new or empty folder, --out=FOLDER, got {out!r}")
    kind = pick(DTYPES, dtype, "dtype")
    run = runs.build(config, workdir)
    sigma = _level(run.convention, sigma, timestep)
    names = _chosen(runs.table_of(run), select, dense=False)
    subject, data = runs.subject_of(run, workdir, prompt), runs.images_of(run, images)
    total = min(count or data.size, data.size)
    if drop_massive:
        subject = _without_massive(subject, data.take(0, min(total, 64))["image"], names, sigma, drop_massive)
    options = {"select": names, "seed": seed, "draws": draws, "side": side, "dtype": kind}
    first, second = itertools.tee(runs.batches(run, data, total))
    features = subject.stream((batch["image"] for batch in first), sigma, **options)
    labels = ({"label": batch["label"]} if "label" in batch else {} for batch in second)
    about = {"data": data.name, "sigma": sigma, "seed": seed, "draws": draws, "prompt": prompt, "drop": subject.drop}
    store.write(out, ({**f, **label} for f, label in zip(features, labels, strict=True)), shard, about)
    size = sum(path.stat().st_size for path in Path(out).iterdir())
    print(f"wrote {len(names)} activations of {total} images at sigma {sigma:g} to {out}, {size / 2**20:.1f} MiB")


def score(
    config: ConfigDict,
    workdir: str,
    *,
    images: str,
    select: str,
    metric: str,
    sigmas: str,
    timesteps: str,
    prompt: str,
    drop_massive: float,
    out: str,
    count: int,
    seed: int,
    side: int,
) -> None:
    """Score activations at each noise level, as a table --out=FILE.csv and a heat map FILE.png.

    --metric=probe is the accuracy of a linear probe of the data's labels, nsr and leak are the noise statistics;
    features are pooled to --side (0: not pooled).
    """
    _check_new(Path(out), Path(out).with_suffix(".png"))
    load_figure_type()
    measure = pick(METRICS, metric, "metric")
    levels = _numbers("sigmas", sigmas)
    check_sigma(levels)
    run = runs.build(config, workdir)
    if timesteps:
        levels = [sigma_of(timestep, run.convention) for timestep in _numbers("timesteps", timesteps)]
    table, data = runs.table_of(run), runs.images_of(run, images)
    names, rows = _chosen(table, select), data.take(0, min(count, data.size))
    if metric == "probe" and "label" not in rows:
        raise ValueError(f"a probe needs labels, {data.name} is unlabelled; use --metric=nsr or --metric=leak")
    subject = runs.subject_of(run, workdir, prompt)
    found = []
    for level in levels:
        if drop_massive:
            subject = _without_massive(subject, rows["image"][:64], names, level, drop_massive)
        found.append(measure(subject, rows, names, level, seed=seed, side=side))
        best = (max if metric == "probe" else min)(names, key=found[-1].__getitem__)
        print(f"sigma {level:g}: best {metric} {found[-1][best]:.4f} at {best}")
    scores = {name: [values[name] for values in found] for name in names}
    columns = (*COLUMNS, *(f"{metric} at sigma {level:g}" for level in levels))
    _write_csv(out, columns, [[*_row(table, name), *(f"{value:.6g}" for value in scores[name])] for name in names])
    heat_map(Path(out).with_suffix(".png"), scores, levels, f"{metric}, {len(rows['image'])} images of {data.name}")
    print(f"wrote {len(names)} activations x {len(levels)} noise levels to {out} with a heat map as .png")


def show(
    config: ConfigDict,
    workdir: str,
    *,
    images: str,
    select: str,
    sigma: float,
    timestep: int,
    prompt: str,
    drop_massive: float,
    out: str,
    count: int,
    seed: int,
) -> None:
    """Draw activations by their principal components, one image per row: the image, then each activation."""
    _check_new(Path(out))
    run = runs.build(config, workdir)
    sigma = _level(run.convention, sigma, timestep)
    names = _chosen(runs.table_of(run), select)
    shown = runs.images_of(run, images).take(0, count)["image"]
    subject = runs.subject_of(run, workdir, prompt)
    if drop_massive:
        subject = _without_massive(subject, shown, names, sigma, drop_massive)
    found = subject.collect(shown, names, sigma, seed=seed)
    columns = [_coloured(shown), *(pca_images(f, shown.shape[1:3]) for f in found.values())]
    tiles = np.stack(columns, 1).reshape(-1, *columns[0].shape[1:])
    runs.save_png(Path(out), runs.image_grid(tiles, columns=len(columns)))
    print(f"wrote {out}, columns from the left: image, {', '.join(found)}")


ACTIONS: dict[str, Callable[..., None]] = {"catalog": catalog, "extract": extract, "score": score, "show": show}


# ------------------------------------------------------------------------------------------ metrics


def _probe(subject: Subject, rows: Batch, names: Sequence[str], sigma: float, **options: Any) -> dict[str, float]:
    return scoring.probe(subject, rows["image"], rows["label"], names, sigma, **options)


def _noise(statistic: str) -> Callable[..., dict[str, float]]:
    def measure(subject: Subject, rows: Batch, names: Sequence[str], sigma: float, **options: Any) -> dict[str, float]:
        found = scoring.noise_in(subject, rows["image"], names, sigma, **options)
        return {name: values[statistic] for name, values in found.items()}

    return measure


METRICS: dict[str, Callable[..., dict[str, float]]] = {"probe": _probe, "nsr": _noise("nsr"), "leak": _noise("leak")}


# ------------------------------------------------------------------------------------------ networks, data, files


def _chosen(table: Catalog, patterns: str, dense: bool = True) -> tuple[str, ...]:
    """The names that patterns, a saved selection @FILE or a published one @NAME select; with `dense` spatial ones."""
    if not patterns.split():
        raise ValueError('give --select="PATTERNS", such as "**/out !**/mlp/*"; jaxdiff features catalog lists names')
    names = choose(table, _listed(patterns))
    kept = tuple(name for name in names if table[name].grid or not dense)
    if not kept:
        raise ValueError(f"none of {', '.join(names[:3])} has a spatial grid; select others than maps and text")
    return kept


def _listed(patterns: str) -> Sequence[str]:
    if not patterns.startswith("@"):
        return patterns.split()
    source = patterns[1:]
    if source in SELECTIONS:
        return SELECTIONS[source]
    if not Path(source).is_file():
        raise ValueError(f"--select={patterns} is no file, and no selection among {', '.join(SELECTIONS)}")
    return load_selection(source).names


def _level(convention: Convention, sigma: float, timestep: int) -> float:
    """The noise level of --sigma, or of --timestep if it is given."""
    check_sigma(sigma)
    return sigma if timestep == -1 else sigma_of(timestep, convention)


def _without_massive(subject: Subject, images: np.ndarray, names: Sequence[str], sigma: float, ratio: float) -> Subject:
    """The subject without channels that are massive in these images; prints them."""
    subject = scoring.without_massive(subject, images, names, sigma, ratio)
    for name, channels in subject.drop.items():
        print(f"sigma {sigma:g}: {name} without channels {', '.join(map(str, channels)) or '(none is massive)'}")
    return subject


def _numbers(flag: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--{flag} is a list of numbers such as 1,50,200, got {text!r}") from None


def _check_new(*paths: Path) -> None:
    """Raise if one of the files exists."""
    for path in paths:
        if path.exists():
            raise ValueError(f"{path} exists; remove it or choose another --out")


def _coloured(images: np.ndarray) -> np.ndarray:
    return np.repeat(images, 3, -1) if images.shape[-1] == 1 else images[..., :3]


def _row(table: Catalog, name: str) -> tuple[object, ...]:
    tap = table[name]
    grid = "x".join(map(str, tap.grid)) if tap.grid else "-"
    return name, tap.kind, tap.stage, "x".join(map(str, tap.shape[1:])), grid, tap.order, tap.flops


def _write_csv(path: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([columns, *rows])
