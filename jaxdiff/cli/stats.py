"""`jaxdiff stats`."""

from __future__ import annotations

from jaxdiff.cli import configs
from jaxdiff.cli.flags import Arguments, Command, Flag, UsageError, check_out


def run(given: Arguments) -> int:
    if not given.out:
        raise UsageError("stats needs --out=FILE.npz, where to write the statistics")
    check_out(given.out, ".npz")
    config = configs.resolve(COMMAND, given)
    from jaxdiff.cli import runs

    count = runs.save_reference_stats(config, given.out)
    print(f"wrote the feature moments of {count} images to {given.out}")
    return 0


COMMAND = Command(
    "Write reference statistics, the mean and covariance of features of the data.",
    run,
    (
        Flag("workdir", "", "folder of a run, whose data to use"),
        Flag("out", "", "FILE.npz to write; eval.reference_stats takes it"),
    ),
    config="either",
    examples=(
        "jaxdiff stats --config=cifar10 --config.eval.weights=inception.safetensors --out=cifar10.npz",
        "jaxdiff evaluate --workdir=runs/cifar10 --config.eval.reference_stats=cifar10.npz",
    ),
)
