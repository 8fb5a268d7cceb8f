"""`jaxdiff train`."""

from __future__ import annotations

from jaxdiff.cli import configs
from jaxdiff.cli.flags import Arguments, Command, Flag, UsageError

CONNECTION = (
    Flag("distributed", False, "one of several processes, detected from the cluster's environment"),
    Flag("coordinator", "", "HOST:PORT of process 0, if no cluster is detected"),
    Flag("processes", 0, "number of processes"),
    Flag("process", -1, "index of this process, from 0"),
    Flag("connect_timeout", 300, "seconds to wait for the other processes at the start"),
    Flag("silence_timeout", 60, "seconds without a heartbeat of another process before this one exits"),
    Flag("stall_timeout", 1800, "seconds without a finished step before several processes exit (one warns); 0: never"),
)


def run(given: Arguments) -> int:
    config = configs.resolve(COMMAND, given)
    if not given.workdir and not given.dry_run:
        raise UsageError("train needs --workdir=FOLDER, the folder for checkpoints, logs and samples")
    from jaxdiff.cli import runs

    if given.init_from:
        config.train.init_from = given.init_from
    if given.dry_run:
        runs.print_shapes(config)
        return 0
    connection = {flag.name: given.values[flag.name] for flag in CONNECTION}
    return runs.train(config, given.workdir, given.allow_config_change, **connection)


COMMAND = Command(
    "Train a config, or resume the run in --workdir (its stored config is used without --config).",
    run,
    (
        Flag("workdir", "", "folder or gs://, s3:// URL for checkpoints, logs and samples; a run there is resumed"),
        Flag("dry_run", False, "print the config and parameter shapes without training"),
        Flag("allow_config_change", False, "resume with a config or data that alter the result of the run so far"),
        Flag("init_from", "", "a workdir to initialise matching parameters from"),
        *CONNECTION,
    ),
    config="file",
    examples=(
        "jaxdiff train --config=digits --workdir=runs/a",
        "jaxdiff train --config=digits:tiny --config.train.steps=100 --workdir=runs/b --dry_run",
        "jaxdiff train --workdir=runs/a --config.train.steps=5000",
        "jaxdiff train --config=digits_sfd --config.teacher.path=runs/a --workdir=runs/few",
        "jaxdiff train --config=digits --workdir=runs/c --coordinator=HOST:PORT --processes=4 --process=0",
    ),
)
