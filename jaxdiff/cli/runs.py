"""Runs for commands: the only module of the command line that imports the training package."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from ml_collections import ConfigDict
from numpy.typing import ArrayLike

from jaxdiff import evaluation, flow_maps, training
from jaxdiff.autoencoders import check_files
from jaxdiff.cli import teachers
from jaxdiff.conditions import SEMANTIC, Signal
from jaxdiff.data import Dataset, DataSpec, load
from jaxdiff.data.examples import Batch
from jaxdiff.features.catalog import Catalog
from jaxdiff.features.catalog import catalog as list_activations
from jaxdiff.features.scoring import Subject
from jaxdiff.files import read_npz, replacing
from jaxdiff.methods import METHODS
from jaxdiff.placement import BATCH
from jaxdiff.training import Run, SavedRun, bucket, distributed, export, inherit, loading, parameters, snapshots, state
from jaxdiff.training.build import reference_data
from jaxdiff.training.components import with_nfe
from jaxdiff.training.evaluate import eval_sampler
from jaxdiff.training.logs import captioned_grid, image_grid, save_png
from jaxdiff.training.sampling import mesh_of
from jaxdiff.trees import path_name
from jaxdiff.weights import files as weights_files

__all__ = ["image_grid", "save_png", "with_nfe"]


def read_config(workdir: str) -> ConfigDict:
    """The config of the run in a folder."""
    return export.read_config(bucket.reading(workdir))


def method_options() -> dict[str, type]:
    """The dataclass of each method's options, by the section of the config that holds them."""
    return {name: entry.options for name, entry in METHODS.items()}


def inherited(method: str, argument: str, kind: str, path: str, overrides: Sequence[tuple[str, str]]) -> ConfigDict:
    """The config of a student that inherits from the teacher at `path`."""
    return inherit.student_config(teachers.config_of(kind, path, overrides), method, argument, kind, path)


# ------------------------------------------------------------------------------------------ train


def train(config: ConfigDict, workdir: str, allow_config_change: bool, **connection: Any) -> int:
    """Train, as one of several processes if the flags say so; the exit code tells whether to restart."""
    try:
        distributed.connect(
            connection["coordinator"],
            connection["processes"],
            connection["process"],
            config=config.to_dict(),
            detect=connection["distributed"],
            timeout=connection["connect_timeout"],
            silence=connection["silence_timeout"],
        )
    except distributed.Late as error:
        print(f"jaxdiff train: {error}", file=sys.stderr)
        return distributed.RETRY
    with distributed.ending_together():
        result = training.train(
            config, workdir, allow_config_change=allow_config_change, stall_timeout=connection["stall_timeout"]
        )
    return distributed.RETRY if result.stopped else 0


def print_shapes(config: ConfigDict) -> None:
    """The resolved config and the shapes of each of its stages, without computing anything."""
    stages = [config]
    if config.curriculum:
        stages = [stage for _, stage in training.stages(config)]
    for stage in stages:
        print(stage)
        run, mesh = training.prepare(stage)
        state.read_frozen(run)  # raises if the teacher is missing or mismatched
        leaves = jax.tree_util.tree_leaves_with_path(state.declare(run, mesh).params["student"])
        for path, leaf in leaves:
            print(f"{path_name(path):60s} {leaf.shape!s:24s} {leaf.sharding.spec}")
        count = sum(int(np.prod(leaf.shape)) for _, leaf in leaves)
        print(f"{count:,} parameters, {run.nfe} evaluations per sample")


# ------------------------------------------------------------------------------------------ sample, evaluate


class Samples(NamedTuple):
    """Images by name, what they were conditioned on, and the network evaluations each took."""

    images: dict[str, np.ndarray]
    labels: np.ndarray | None
    captions: list[str]
    nfe: int


def open_run(config: ConfigDict, workdir: str, step: str = "") -> SavedRun:
    """A run to sample from, as exported or at a kept step; its parameters are read later."""
    check_files(config)
    return training.load(workdir, config, step=step)


def makes_images(saved: SavedRun) -> bool:
    """Whether samples have height, width and channels, so that a grid can show them."""
    return len(saved.run.data.shape) == 3


def sample(saved: SavedRun, count: int, seed: int, labels: str | int, prompts: Sequence[str]) -> Samples:
    """Samples of a run: for the prompts, or else the captions of its data."""
    images, drawn = saved.sampler(labels, prompts).sample(saved.params, count, seed)
    captions = [prompts[i % len(prompts)] for i in range(count)] if prompts else []
    if not captions and "text" in saved.run.conditions:
        captions = training.captions_of(saved.run.data, count)
    return Samples({"images": images}, drawn, captions, saved.run.nfe)


def correct(saved: SavedRun, count: int, seed: int, labels: str | int, steps: int) -> Samples:
    """Samples of an EMD generator before and after Langevin steps."""
    sampler = training.Sampler(saved.run, saved.mesh, labels, correct_steps=steps)
    pairs, drawn = sampler.sample(saved.state(), count, seed, decode=False)
    return Samples({"before": pairs[:, 0], "after": pairs[:, 1]}, drawn, [], saved.run.nfe)


def write_samples(out: Path, made: Samples) -> None:
    """A grid as .png, with captions if there are any, or the arrays as .npz."""
    if out.suffix == ".npz":
        columns: dict[str, Any] = dict(made.images)
        if made.labels is not None:
            columns["labels"] = made.labels
        if made.captions:
            columns["captions"] = np.asarray(made.captions)
        with replacing(out) as partial:
            np.savez(partial, **columns)
    elif made.captions:
        save_png(out, captioned_grid(made.images["images"], made.captions))
    else:
        save_png(out, np.concatenate([image_grid(group) for group in made.images.values()], 1))


def evaluate(
    config: ConfigDict, workdir: str, reference_stats: str = "", step: str = "", repeats: int = 1
) -> evaluation.Record:
    """The distances between samples of a run and its data, or stored statistics of such data."""
    saved = open_run(config, workdir, step)
    if not (reference_stats or config.eval.reference_stats):
        with instead_of_data("--reference_stats=FILE.npz, feature moments that --save_reference_stats writes"):
            saved = saved.with_data()
    run, mesh = saved.run, saved.mesh
    record = training.evaluate(run, saved.params, mesh, reference_stats=reference_stats, repeats=repeats)
    assert record is not None  # never stopped here
    return {"step": saved.step, **record}


def combine_averages(workdir: str, widths: Sequence[float], step: int) -> dict[float, Path]:
    """Combine stored averages into those of other widths, write them to the workdir, and return their files."""
    written = {}
    for width, arrays in snapshots.combine(Path(workdir), widths, step).items():
        written[width] = snapshots.combined_path(Path(workdir), width)
        weights_files.write(written[width], arrays)
    return written


def evaluate_averages(config: ConfigDict, workdir: str, paths: Mapping[float, Path]) -> Iterator[evaluation.Record]:
    """The evaluation of each average, with its width; one program samples all of them."""
    saved = open_run(config, workdir).with_data()
    sampler = eval_sampler(saved.run, saved.mesh)
    for width, path in paths.items():
        record = training.evaluate(saved.run, saved.read(path), saved.mesh, sampler=sampler)
        assert record is not None  # never stopped here
        yield {"width": width, **record}


def compare_halves(config: ConfigDict) -> evaluation.Record:
    """The distances between two halves of the data."""
    return training.compare_halves(build(config))


def save_reference_stats(config: ConfigDict, path: str) -> int:
    """Write the feature moments of a config's data; returns the number of images."""
    return training.save_reference_stats(build(config), path, mesh_of(config))


@contextmanager
def instead_of_data(flag: str) -> Iterator[None]:
    """If the data of a run is missing, the error names the flag to use instead."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}; without the data of this run, pass {flag}") from error


def record_evaluation(workdir: str, record: evaluation.Record) -> None:
    """Append a record to those of the run."""
    bucket.append_line(workdir, "evaluations.jsonl", lambda path: evaluation.write(path, record))


# ------------------------------------------------------------------------------------------ features


def build(config: ConfigDict, workdir: str = "") -> Run:
    """The network of a config without parameters, for the data of the run in `workdir`, else the config's."""
    data = loading.data_of(bucket.reading(workdir), config) if workdir else training.load_data(config)
    return training.build(config, data)


def table_of(run: Run) -> Catalog:
    """Every activation of a run's network."""
    return list_activations(run.model, (1, *run.data.shape), run.conditions.example(1))


def subject_of(run: Run, workdir: str, prompt: str = "") -> Subject:
    """The network with the parameters of the run in `workdir`, or of train.init_from, given a prompt or none."""
    cond = conditioned_on(run, prompt)
    source = workdir or run.config.train.init_from
    if not source:
        raise ValueError(
            "give --workdir=FOLDER of a run, or --config=NAME with --config.train.init_from=FILE of public weights and "
            "--config.train.init_kind=dit (or edm, sd_unet...)"
        )
    loaded = parameters.read(source, "run" if workdir else run.config.train.init_kind, run.model)
    parameters.check_convention(loaded, run.convention)
    params = parameters.fitted(loaded, parameters.shapes_of(run.model, run.conditions, run.data.shape))
    mesh = mesh_of(run.config)
    return Subject(run.model, params, run.convention, cond, NamedSharding(mesh, BATCH))


def unconditional(run: Run) -> dict[str, ArrayLike]:
    """The condition of a network given images alone: null values, uncropped images, step 0.

    A flow map is a denoiser at tau = sigma, which is set where sigma is known.
    """
    found = dict(run.conditions.null(SEMANTIC) or {})
    found |= {name: value for name, value in run.control.items() if name in run.conditions}
    for name, signal in run.conditions.items():
        if name not in found and name != flow_maps.TAU:
            found[name] = np.zeros(signal.batch_shape(1)[1:], signal.dtype)
    return found


def conditioned_on(run: Run, prompt: str) -> dict[str, ArrayLike]:
    """The condition of every image: a prompt, or its embeddings in an .npz file; "" is the null condition."""
    found = unconditional(run)
    if not prompt:
        return found
    if "text" not in run.conditions:
        name, takes = run.config.model.name, ", ".join(run.conditions) or "nothing"
        raise ValueError(f"--prompt needs a text-conditioned network; {name} is conditioned on {takes}")
    wanted = [name for name in ("text", "text_mask", "pooled") if name in run.conditions]
    if prompt.endswith(".npz"):
        return {**found, **read_embeddings(prompt, wanted, run.conditions)}
    if run.data.text is None:
        raise ValueError(
            f"--prompt={prompt!r} needs a text encoder, which data of the source {run.data.name!r} do not have; give "
            f"--prompt=FILE.npz with the embeddings of the prompt ({', '.join(wanted)})"
        )
    rows = run.data.text([prompt])
    return {**found, **{name: rows[name][0] for name in wanted}}


def read_embeddings(path: str, names: Sequence[str], conditions: Mapping[str, Signal]) -> dict[str, np.ndarray]:
    """The embeddings of one prompt, each array of one example; a leading axis of length 1 is dropped."""
    if not Path(path).is_file():
        raise ValueError(f"--prompt: no file {Path(path).absolute()}")
    stored = read_npz(path)
    missing = [name for name in names if name not in stored]
    if missing:
        raise ValueError(f"--prompt={path} has {', '.join(stored)}; the network also needs {', '.join(missing)}")
    rows = {name: stored[name][0] if len(stored[name]) == 1 else stored[name] for name in names}
    for name, value in rows.items():
        shape = conditions[name].shape
        fits = len(shape) == value.ndim and all(w in (None, n) for w, n in zip(shape, value.shape, strict=True))
        if not fits:
            raise ValueError(f"--prompt={path}: {name} has shape {value.shape}, the network expects {shape}")
    return rows


def images_of(run: Run, path: str) -> Dataset:
    """The images that features are taken of: those at --images, else the data of the run in stored order."""
    if path:
        return images_at(path, run.data)
    with instead_of_data("--images=FILE.npz or --images=FOLDER"):
        return reference_data(run.config)


def images_at(path: str, spec: DataSpec) -> Dataset:
    """An .npz file with `images`, a folder of image files, or a file of latents, as images of the run's shape."""
    if spec.latent is not None:
        made = load("latents", path=path, shuffle=False)
    else:
        height, width, channels = spec.shape
        options: dict[str, Any] = {"shuffle": False, "channels": channels}
        if height == width:
            options["image_size"] = height
        if Path(path).suffix == ".npz":
            made = load("arrays", images=path, **options)
        else:
            made = load("folder", path=path, **options)
    if made.shape != spec.shape:
        raise ValueError(f"--images={path} has examples of shape {made.shape}, the run was trained on {spec.shape}")
    return made


def batches(run: Run, data: Dataset, count: int) -> Iterator[Batch]:
    """The first `count` examples, in batches of sample.batch_size."""
    size = run.config.sample.batch_size
    return (data.take(start, min(start + size, count)) for start in range(0, count, size))
