"""`jaxdiff ema`."""

from __future__ import annotations

from jaxdiff.cli import configs
from jaxdiff.cli.flags import Arguments, Command, Flag, UsageError, check_local


def run(given: Arguments) -> int:
    if not given.workdir:
        raise UsageError("ema needs --workdir=FOLDER of a run")
    check_local("workdir", given.workdir)
    widths = parse_widths(given.widths)
    config = configs.resolve(COMMAND, given)
    from jaxdiff.cli import runs

    paths = runs.combine_averages(given.workdir, widths, given.step)
    for width, path in paths.items():
        print(f"width {width:g}: wrote {path}")
    if given.evaluate:
        for record in runs.evaluate_averages(config, given.workdir, paths):
            values = [f"{name} {value:.4f}" for name, value in record.items() if isinstance(value, float)]
            print(", ".join(values))
            runs.record_evaluation(given.workdir, record)
    return 0


def parse_widths(text: str) -> list[float]:
    """The widths of --widths=0.05,0.1."""
    try:
        widths = [float(part) for part in text.split(",")]
    except ValueError:
        widths = []
    if not widths or len(set(widths)) < len(widths):
        raise UsageError(f"--widths takes different relative widths separated by commas, as 0.05,0.1; got {text!r}")
    return widths


COMMAND = Command(
    "Combine stored averages of a run into averages of other widths, and evaluate each.",
    run,
    (
        Flag("workdir", "", "folder of a run with ema.widths; files are written to its folder averages"),
        Flag("widths", "0.05,0.1,0.15,0.2,0.25", "relative widths of the power-function averages to make"),
        Flag("step", 0, "training step of the averages, one of the stored; 0: the last"),
        Flag("evaluate", False, "evaluate samples of each, and append the records to evaluations.jsonl"),
    ),
    config="run",
    examples=(
        "jaxdiff ema --workdir=runs/edm2 --widths=0.05,0.07,0.1,0.15 --evaluate",
        "jaxdiff sample --workdir=runs/edm2 --config.sample.average=0.07",
    ),
)
