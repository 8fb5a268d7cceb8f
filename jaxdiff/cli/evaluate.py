"""`jaxdiff evaluate`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxdiff.cli import configs
from jaxdiff.cli.flags import TEACHER, Arguments, Command, Flag, UsageError, check_local, check_out


def run(given: Arguments) -> int:
    if given.reference not in ("", "train"):
        raise UsageError(f"--reference is 'train' (compare halves of the data) or empty, got {given.reference!r}")
    if given.config is not None and not (given.workdir or given.reference or given.save_reference_stats):
        raise UsageError("evaluate needs --workdir=FOLDER of a run, or --config=NAME --reference=train")
    if given.repeats < 1:
        raise UsageError(f"--repeats is a number of sets of samples, at least 1, got {given.repeats}")
    if given.teacher:
        return _of_teacher(given)
    if given.images:
        given.overrides = [*_data_of(given.images), *given.overrides]
    config = configs.resolve(COMMAND, given)
    from jaxdiff.cli import runs

    if given.save_reference_stats:
        check_out(given.save_reference_stats, ".npz")
        count = runs.save_reference_stats(config, given.save_reference_stats)
        print(f"wrote the feature moments of {count} images to {given.save_reference_stats}")
        return 0
    if given.reference == "train":
        record = runs.compare_halves(config)
    else:
        config = runs.with_nfe(config, given.nfe)
        record = runs.evaluate(config, given.workdir, given.reference_stats, given.step, given.repeats)
    show(record)
    if given.workdir:
        runs.record_evaluation(given.workdir, record)
    return 0


def _of_teacher(given: Arguments) -> int:
    """Evaluate a teacher that is no run."""
    if given.workdir or given.step or given.reference or given.save_reference_stats:
        raise UsageError("--teacher excludes --workdir, --step, --reference and --save_reference_stats")
    from jaxdiff import training
    from jaxdiff.cli import teachers

    overrides = [*_data_of(given.images), *given.overrides]
    saved = teachers.opened(given.teacher, given.kind, overrides)
    saved = saved.with_nfe(given.nfe) if given.nfe else saved
    how = {"reference_stats": given.reference_stats, "repeats": given.repeats}
    record = training.evaluate(saved.run, saved.params, saved.mesh, **how)
    assert record is not None  # never stopped here
    show(record)
    return 0


def _data_of(images: str) -> list[tuple[str, str]]:
    """The data section of --images: an .npz with `images` and `labels`, or a folder of image files."""
    if not images:
        return []
    check_local("images", images)
    source, option = ("arrays", "images") if images.endswith(".npz") else ("folder", "path")
    return [("data.source", source), ("data.options", f"{{{option!r}: {images!r}}}")]


def show(record: Mapping[str, Any]) -> None:
    """Print every entry of a record, metrics with their spread."""
    spread = record.get("spread", {})
    for name, value in record.items():
        shown = f"{value:.4f}" if isinstance(value, float) else str(value)
        print(f"{name}: {shown} ± {spread[name]:.4f}" if name in spread else f"{name}: {shown}")


COMMAND = Command(
    "Measure the distance between samples of a run and its data, and record the protocol.",
    run,
    (
        Flag("workdir", "", "folder of the run; the record is appended to its evaluations.jsonl"),
        Flag("reference", "", "train: compare two halves of the data, a lower bound for samples", ("train",)),
        *TEACHER,
        Flag("images", "", "FILE.npz (images, labels) or FOLDER of images to compare with, instead of the run's data"),
        Flag("reference_stats", "", "FILE.npz of feature moments, used instead of the data"),
        Flag("save_reference_stats", "", "FILE.npz: only write the feature moments of the data"),
        Flag("nfe", 0, "network evaluations per sample; 0: as in the run's config"),
        Flag("step", "", "best (by checkpoint.metric) or the number of a kept checkpoint; empty: the exported one"),
        Flag("repeats", 1, "sets of samples, of successive seeds: metrics become mean ± standard deviation"),
    ),
    config="either",
    examples=(
        "jaxdiff evaluate --workdir=runs/few --nfe=2 --config.eval.samples=5000",
        "jaxdiff evaluate --workdir=runs/few --step=best --repeats=3",
        "jaxdiff evaluate --teacher=my_teacher.py:load --images=photos --config.eval.net=my_features.py:features",
        "jaxdiff evaluate --config=digits --reference=train",
        "jaxdiff evaluate --config=digits --save_reference_stats=digits.npz",
        "jaxdiff evaluate --workdir=runs/few --reference_stats=digits.npz",
    ),
)
