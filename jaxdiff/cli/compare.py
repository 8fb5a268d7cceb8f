"""`jaxdiff compare`."""

from __future__ import annotations

from pathlib import Path

from jaxdiff.cli import configs
from jaxdiff.cli.flags import TEACHER, Arguments, Command, Flag, UsageError, check_local


def run(given: Arguments) -> int:
    if not given.teacher:
        raise UsageError("compare needs --teacher=RUN, FILE.py:load, or a weights file with --kind")
    if not given.workdir:
        raise UsageError("compare needs --workdir=FOLDER for the students and the report; run again to add methods")
    check_local("workdir", given.workdir)
    names = [name for name in (given.methods or ",".join(configs.recipes())).split(",") if name]
    numbers = {name: _numbers(name, str(given.values[name])) for name in ("nfe", "guidance", "rates")}
    from jaxdiff import compare
    from jaxdiff.cli import teachers
    from jaxdiff.cli.options import override
    from jaxdiff.training.distributed import RETRY

    settings = compare.Settings(
        methods=tuple(names),
        budget=compare.Budget.read(given.budget),
        seeds=given.seeds,
        nfe=tuple(int(n) for n in numbers["nfe"]),
        samples=given.samples,
        rates=numbers["rates"],
        search=given.search,
        solvers=tuple(name for name in given.solvers.split(",") if name),
        guidance=numbers["guidance"],
    )
    kind = teachers.kind_of(given.teacher, given.kind)
    inherited = [(key, text) for key, text in given.overrides if key.split(".")[0] not in configs.recipes()]
    config = teachers.config_of(kind, given.teacher, given.overrides)
    with config.unlocked():
        config.teacher.kind, config.teacher.path = kind, given.teacher
    override(config, inherited)
    later = [pair for pair in given.overrides if pair not in inherited]
    try:
        compare.compare(config, settings, Path(given.workdir), edit=lambda student: override(student, later))
    except compare.Stopped as stopped:
        print(stopped)
        return RETRY
    return 0


def _numbers(name: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",") if part)
    except ValueError:
        raise UsageError(f"--{name} is a list of numbers such as 1,2,4; got {text!r}") from None


COMMAND = Command(
    "Compare methods on one teacher: students at equal cost, solvers beside, one table.",
    run,
    (
        *TEACHER,
        Flag("workdir", "", "folder for the students and the report; run again to resume or to add methods and seeds"),
        Flag("methods", "", "methods such as sfd:2-5,emd,consistency; empty: all that have a recipe"),
        Flag("budget", "300s", "of each student: seconds of training (300s, 5m) or network evaluations (2e6)"),
        Flag("seeds", 1, "students per method"),
        Flag("nfe", "1,2,4", "evaluations per sample that are measured, where a sampler takes them"),
        Flag("samples", 2000, "samples per row of the table"),
        Flag("rates", "0.3,1,3", "factors on each recipe's learning rate that are searched; 1: none"),
        Flag("search", 0.3, "share of the budget that searches the learning rate"),
        Flag("solvers", "euler,heun,ipndm,ipndm+afs,dpmpp2m,unipc", "solvers beside; +afs: analytic first step"),
        Flag("guidance", "", "guidance scales that students learn; empty: that of the teacher's config, and 1"),
    ),
    config="run",
    examples=(
        "jaxdiff compare --teacher=runs/digits --methods=sfd:2-5,emd,consistency --budget=300s --workdir=runs/compared",
        "jaxdiff compare --teacher=my_teacher.py:load --budget=2e6 --workdir=runs/mine --config.emd.score_updates=2",
    ),
)
