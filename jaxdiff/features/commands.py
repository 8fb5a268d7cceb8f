"""The commands `jaxdiff features catalog | extract | score | show`, from a run or public weights to tables and files.

Each is a function of the config and the run's folder, "" for the weights of `train.init_from`; its other arguments are
the command's flags.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from ml_collections import ConfigDict

from jaxdiff import training
from jaxdiff.data import Dataset
from jaxdiff.errors import check_sigma, pick
from jaxdiff.features import scoring, store
from jaxdiff.features.catalog import Catalog
from jaxdiff.features.catalog import catalog as list_activations
from jaxdiff.features.pictures import heat_map, pca_pictures
from jaxdiff.features.scoring import Subject
from jaxdiff.features.select import load_selection
from jaxdiff.features.select import select as choose
from jaxdiff.training import trainer
from jaxdiff.training.build import Job, build_wrapper, reference_data
from jaxdiff.training.logs import image_grid, save_png
from jaxdiff.training.sharding import BATCH

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
COLUMNS = ("name", "kind", "stage", "shape", "grid", "order", "operations")


def catalog(config: ConfigDict, workdir: str, *, select: str = "**", out: str = "") -> None:
    """Prints the activations, with the operations to reach each for one image; --out=FILE.csv writes them too."""
    _check_new(out, ".csv")
    job = training.build(config)
    table = table_of(job)
    rows = [[str(cell) for cell in _row(table, name)] for name in choose(table, select.split())]
    widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
    for row in [list(COLUMNS), *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(f"{len(rows)} of {len(table)} activations of {type(job.model).__name__}; maps only where asked for")
    if out:
        _write_csv(out, COLUMNS, rows)


def extract(
    config: ConfigDict,
    workdir: str,
    *,
    select: str = "",
    sigma: float = 0.2,
    out: str = "",
    count: int = 0,
    seed: int = 0,
    draws: int = 1,
    side: int = 0,
    dtype: str = "float32",
    shard: int = 1024,
) -> None:
    """Writes features of the data's first `count` images (0: all), in stored order, as shards in the folder --out."""
    if not out or (Path(out).exists() and any(Path(out).iterdir())):
        raise ValueError(f"extract writes to a new or empty folder, --out=FOLDER, got {out!r}")
    kind = pick(DTYPES, dtype, "dtype")
    check_sigma(sigma)
    job = training.build(config)
    names, subject, images = (
        _chosen(table_of(job), select, dense=False),
        subject_of(job, workdir),
        reference_data(config),
    )
    total = min(count or images.size, images.size)
    options = {"select": names, "seed": seed, "draws": draws, "side": side, "dtype": kind}
    first, second = itertools.tee(_batches(job, images, total))
    features = subject.stream((batch["image"] for batch in first), sigma, **options)
    labels = ({"label": batch["label"]} if "label" in batch else {} for batch in second)
    about = {"data": images.name, "sigma": sigma, "seed": seed, "draws": draws}
    store.write(out, ({**f, **label} for f, label in zip(features, labels, strict=True)), shard, about)
    size = sum(path.stat().st_size for path in Path(out).iterdir())
    print(f"wrote {len(names)} activations of {total} images at sigma {sigma:g} to {out}, {size / 2**20:.1f} MiB")


def score(
    config: ConfigDict,
    workdir: str,
    *,
    select: str = "**",
    metric: str = "probe",
    sigmas: str = "0.05,0.1,0.2,0.4,0.8",
    out: str = "scores.csv",
    count: int = 512,
    seed: int = 0,
    side: int = 2,
) -> None:
    """Scores activations at each noise level, into a table --out=FILE.csv and a heat map FILE.png beside it.

    --metric=probe is the accuracy of a linear probe of the data's labels, nsr and leak are the noise statistics;
    features are pooled to --side (0 leaves their grids).
    """
    _check_new(out, ".csv", ".png")
    levels = _levels(sigmas)
    measure = pick(METRICS, metric, "metric")
    job = training.build(config)
    table, data = table_of(job), reference_data(config)
    names, rows = _chosen(table, select), data.take(0, min(count, data.size))
    if metric == "probe" and "label" not in rows:
        raise ValueError(f"a probe needs labels, which {data.name} has not; use --metric=nsr or --metric=leak")
    subject = subject_of(job, workdir)
    found = []
    for level in levels:
        found.append(measure(subject, rows, names, level, seed=seed, side=side))
        best = (max if metric == "probe" else min)(names, key=found[-1].__getitem__)
        print(f"sigma {level:g}: best {metric} {found[-1][best]:.4f} at {best}")
    scores = {name: [values[name] for values in found] for name in names}
    columns = (*COLUMNS, *(f"{metric} at sigma {level:g}" for level in levels))
    _write_csv(out, columns, [[*_row(table, name), *(f"{value:.6g}" for value in scores[name])] for name in names])
    heat_map(Path(out).with_suffix(".png"), scores, levels, f"{metric}, {len(rows['image'])} images of {data.name}")
    print(f"wrote {len(names)} activations x {len(levels)} noise levels to {out} and its heat map beside it")


def show(
    config: ConfigDict,
    workdir: str,
    *,
    select: str = "",
    sigma: float = 0.2,
    out: str = "features.png",
    count: int = 8,
    seed: int = 0,
) -> None:
    """Draws activations by their principal components, an image a row: itself, then each activation in its order."""
    _check_new(out, ".png")
    check_sigma(sigma)
    job = training.build(config)
    names = _chosen(table_of(job), select)
    images = reference_data(config).take(0, count)["image"]
    found = subject_of(job, workdir).collect(images, names, sigma, seed=seed)
    columns = [_coloured(images), *(pca_pictures(f, images.shape[1:3]) for f in found.values())]
    save_png(Path(out), image_grid(np.stack(columns, 1).reshape(-1, *columns[0].shape[1:]), columns=len(columns)))
    print(f"wrote {out}, columns from the left: image, {', '.join(found)}")


ACTIONS: dict[str, Callable[..., None]] = {"catalog": catalog, "extract": extract, "score": score, "show": show}


# ------------------------------------------------------------------------------------------ metrics


def _probe(subject: Subject, rows: Any, names: Any, sigma: float, **options: Any) -> dict[str, float]:
    return scoring.probe(subject, rows["image"], rows["label"], names, sigma, **options)


def _noise(statistic: str) -> Callable[..., dict[str, float]]:
    def measure(subject: Subject, rows: Any, names: Any, sigma: float, **options: Any) -> dict[str, float]:
        found = scoring.noise_in(subject, rows["image"], names, sigma, **options)
        return {name: values[statistic] for name, values in found.items()}

    return measure


METRICS: dict[str, Callable[..., dict[str, float]]] = {"probe": _probe, "nsr": _noise("nsr"), "leak": _noise("leak")}


# ------------------------------------------------------------------------------------------ networks, data, files


def table_of(job: Job) -> Catalog:
    null = {name: jnp.asarray(value)[None] for name, value in (job.null or {}).items()}
    return list_activations(job.model, (1, *job.dataset.image_shape), null or None)


def subject_of(job: Job, workdir: str) -> Subject:
    source = workdir or job.config.train.init_from
    if not source:
        raise ValueError(
            "give --workdir=FOLDER of a run, or --config=configs/NAME.py with --config.train.init_from=FILE of public "
            "weights and --config.train.init_kind=dit (or edm, sd_unet...)"
        )
    kind = "run" if workdir else job.config.train.init_kind
    params = trainer.given(job, Path(source), kind, trainer.declare(job)[0])
    return Subject(job.model, params, build_wrapper(job.config), job.null or {}, NamedSharding(job.mesh, BATCH))


def _chosen(table: Catalog, patterns: str, dense: bool = True) -> tuple[str, ...]:
    """The names that patterns select, or the list @FILE of `Selection.save`; with `dense` those over the image."""
    if not patterns.split():
        raise ValueError('give --select="PATTERNS", such as "**/out !**/mlp/*"; jaxdiff features catalog lists names')
    listed = load_selection(patterns[1:]).names if patterns.startswith("@") else patterns.split()
    names = choose(table, listed)
    kept = tuple(name for name in names if table[name].grid or not dense)
    if not kept:
        raise ValueError(f"none of {', '.join(names[:3])} lies over the image; choose others than maps and text")
    return kept


def _batches(job: Job, data: Dataset, count: int) -> Iterator[dict[str, Any]]:
    size = job.config.sample.batch_size
    return (data.take(start, min(start + size, count)) for start in range(0, count, size))


def _levels(text: str) -> list[float]:
    try:
        levels = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--sigmas is a list of noise levels such as 0.1,0.2, got {text!r}") from None
    check_sigma(levels)
    return levels


def _check_new(out: str, *suffixes: str) -> None:
    """`out` ends in the first suffix, and it and its companions do not exist yet."""
    if not out:
        return
    if Path(out).suffix != suffixes[0]:
        raise ValueError(f"--out must end in {suffixes[0]}, got {out!r}")
    for suffix in suffixes:
        if Path(out).with_suffix(suffix).exists():
            raise ValueError(f"{Path(out).with_suffix(suffix)} exists; remove it or choose another --out")


def _coloured(images: np.ndarray) -> np.ndarray:
    return np.repeat(images, 3, -1) if images.shape[-1] == 1 else images[..., :3]


def _row(table: Catalog, name: str) -> tuple[Any, ...]:
    tap = table[name]
    grid = "x".join(map(str, tap.grid)) if tap.grid else "-"
    return name, tap.kind, tap.stage, "x".join(map(str, tap.shape[1:])), grid, tap.order, tap.flops


def _write_csv(path: str, columns: Any, rows: Any) -> None:
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([columns, *rows])
