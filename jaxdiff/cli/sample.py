"""`jaxdiff sample`."""

from __future__ import annotations

from pathlib import Path

from jaxdiff.cli import configs
from jaxdiff.cli.flags import TEACHER, Arguments, Command, Flag, UsageError, check_count, check_out


def run(given: Arguments) -> int:
    check_out(given.out, ".png", ".npz")
    check_count(given.count)
    labels, prompts = read_labels(given.labels), read_prompts(given.prompts)
    if given.mcmc_steps < 0 or (given.mcmc_steps and given.nfe):
        raise UsageError(f"--mcmc_steps is a number of Langevin steps, without --nfe; got {given.mcmc_steps}")
    if given.teacher:
        if given.workdir or given.step or given.mcmc_steps:
            raise UsageError("--teacher is sampled as it is: leave out --workdir, --step and --mcmc_steps")
        from jaxdiff.cli import runs, teachers

        saved = teachers.opened(given.teacher, given.kind, given.overrides)
        saved = saved.with_nfe(given.nfe) if given.nfe else saved
    else:
        config = configs.resolve(COMMAND, given)
        from jaxdiff.cli import runs

        saved = runs.open_run(runs.with_nfe(config, given.nfe), given.workdir, given.step)
    if given.out.endswith(".png") and not runs.makes_images(saved):
        raise UsageError("samples of this run are points, not images; write them with --out=FILE.npz")
    print("compiling the sampler ...", flush=True)
    if given.mcmc_steps:
        made = runs.correct(saved, given.count, given.seed, labels, given.mcmc_steps)
        how = f"left before, right after {given.mcmc_steps} Langevin steps"
    else:
        made = runs.sample(saved, given.count, given.seed, labels, prompts)
        how = saved.config.sample.solver
    runs.write_samples(Path(given.out), made)
    of = f" of step {saved.step}" if given.step else ""
    print(f"wrote {given.count} samples{of} to {given.out}: {how}, {made.nfe} evaluations each")
    return 0


def read_labels(text: str) -> str | int:
    """cycle, random or a class number."""
    if text.lstrip("-").isdigit():
        return int(text)
    if text not in ("cycle", "random"):
        raise UsageError(f"--labels is cycle, random or a class number, got {text!r}")
    return text


def read_prompts(given: str) -> list[str]:
    """The prompts separated by |, or the lines of a file."""
    path = Path(given)
    if path.suffix == ".txt":
        if not path.is_file():
            raise UsageError(f"--prompts: no file {path.absolute()}")
        given = path.read_text(encoding="utf-8").replace("\n", "|")
    return [prompt.strip() for prompt in given.split("|") if prompt.strip()]


COMMAND = Command(
    "Sample from a run: a grid of images, or their arrays.",
    run,
    (
        Flag("workdir", "", "folder of the run"),
        *TEACHER,
        Flag("count", 64, "number of samples"),
        Flag("seed", 0, "sample i depends only on the seed and i"),
        Flag("labels", "cycle", "cycle (through the classes), random, or a class number", ("cycle", "random")),
        Flag("prompts", "", '"a red circle|a blue square", or a file prompts.txt with one prompt per line'),
        Flag("out", "samples.png", "FILE.png for a grid, FILE.npz for the arrays"),
        Flag("nfe", 0, "network evaluations per sample; 0: as in the run's config"),
        Flag("step", "", "best (by checkpoint.metric) or the number of a kept checkpoint; empty: the exported one"),
        Flag("mcmc_steps", 0, "show an EMD generator's samples before and after this many Langevin steps"),
    ),
    config="run",
    examples=(
        "jaxdiff sample --workdir=runs/a --count=64 --out=samples.png --nfe=10",
        "jaxdiff sample --workdir=runs/a --labels=7 --config.sample.solver=unipc",
        "jaxdiff sample --teacher=my_teacher.py:load --nfe=20",
        'jaxdiff sample --workdir=runs/t2i --prompts="a red circle left of a blue square"',
    ),
)
