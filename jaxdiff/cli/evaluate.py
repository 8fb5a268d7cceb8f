"""`jaxdiff evaluate`."""

from __future__ import annotations

from jaxdiff.cli import configs
from jaxdiff.cli.flags import Arguments, Command, Flag, UsageError, check_out


def run(given: Arguments) -> int:
    if given.reference not in ("", "train"):
        raise UsageError(f"--reference is 'train' (compare halves of the data) or empty, got {given.reference!r}")
    if given.config is not None and not (given.workdir or given.reference or given.save_reference_stats):
        raise UsageError("evaluate needs --workdir=FOLDER of a run, or --config=NAME --reference=train")
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
        record = runs.evaluate(runs.with_nfe(config, given.nfe), given.workdir, given.reference_stats)
    for name, value in record.items():
        print(f"{name}: {value:.4f}" if isinstance(value, float) else f"{name}: {value}")
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
    ),
    config="either",
    examples=(
        "jaxdiff evaluate --workdir=runs/few --nfe=2 --config.eval.samples=5000",
        "jaxdiff evaluate --config=digits --reference=train",
        "jaxdiff evaluate --config=digits --save_reference_stats=digits.npz",
        "jaxdiff evaluate --workdir=runs/few --reference_stats=digits.npz",
    ),
)
