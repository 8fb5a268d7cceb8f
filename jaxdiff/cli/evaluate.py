"""`jaxdiff evaluate`."""

from __future__ import annotations

from jaxdiff.cli import configs
from jaxdiff.cli.flags import Arguments, Command, Flag, UsageError, check_out


def run(given: Arguments) -> int:
    if given.reference not in ("", "train"):
        raise UsageError(f"--reference is 'train' (compare halves of the data) or empty, got {given.reference!r}")
    if given.config is not None and not (given.workdir or given.reference or given.save_reference_stats):
        raise UsageError("evaluate needs --workdir=FOLDER of a run, or --config=NAME --reference=train")
    if given.repeats < 1:
        raise UsageError(f"--repeats is a number of sets of samples, at least 1, got {given.repeats}")
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
    spread = record.get("spread", {})
    for name, value in record.items():
        shown = f"{value:.4f}" if isinstance(value, float) else str(value)
        print(f"{name}: {shown} ± {spread[name]:.4f}" if name in spread else f"{name}: {shown}")
    if given.workdir:
        runs.record_evaluation(given.workdir, record)
    return 0


COMMAND = Command(
    "Measure the distance between samples of a run and its data, and record the protocol.",
    run,
    (
        Flag("workdir", "", "folder of the run; the record is appended to its evaluations.jsonl"),
        Flag("reference", "", "train: compare two halves of the data, a lower bound for samples", ("train",)),
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
        "jaxdiff evaluate --config=digits --reference=train",
        "jaxdiff evaluate --config=digits --save_reference_stats=digits.npz",
        "jaxdiff evaluate --workdir=runs/few --reference_stats=digits.npz",
    ),
)
