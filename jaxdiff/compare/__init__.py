"""Every few-step method on one teacher, under one protocol: `jaxdiff compare`, docs/compare.md.

    compare(teacher_config, settings, folder) -> results

Students are trained with equal budgets from the same teacher, and sampled from the same noise as the teacher is with
solvers that need no training. Rerunning skips what is done and adds methods, seeds and guidance scales.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from jaxdiff.compare import report, students
from jaxdiff.compare.measure import Meter, with_samples
from jaxdiff.compare.settings import Budget, Record, Settings, check_folder, method_name, stored
from jaxdiff.compare.students import Stopped
from jaxdiff.errors import choose
from jaxdiff.remote import is_remote
from jaxdiff.training import Sampler, SavedRun, inherit, open_teacher
from jaxdiff.training.components import with_nfe

SCALES = (1.0, 1.5, 2.0, 3.0)  # guidance of the teacher that is always measured, where it has guidance
MORE = (10,)  # evaluations of the solvers, besides those of the students

__all__ = ["Budget", "Settings", "Stopped", "compare"]


def compare(
    teacher: ConfigDict,
    settings: Settings,
    folder: Path,
    *,
    edit: Callable[[ConfigDict], None] | None = None,
    say: students.Say = print,
) -> Record:
    """Train, measure and report; `teacher` is a config whose section `teacher` names it, `edit` changes students'."""
    for text in settings.methods:
        method_name(text, inherit.recipes())
    folder.mkdir(parents=True, exist_ok=True)
    check_folder(folder, {"teacher": _absolute(teacher.teacher.path), **settings.fixed()})
    opened = open_teacher(with_samples(teacher, settings))
    meter = Meter(opened, settings)
    scales, why = _scales(opened, settings)
    refused = {} if why == "" else {"guidance": why}
    rows = [row for row in _teacher_rows(opened, meter, settings, folder / "teacher", say) if row is not None]
    for text in settings.methods:
        for guidance in scales:
            try:
                made = students.student(teacher, text, settings, guidance, edit)
            except ValueError as error:
                refused[text] = str(error)
                say(f"{text} does not apply: {error}")
                break
            rows += _student_rows(made, guidance, settings, meter, folder, say)
    results = {
        "teacher": teacher.teacher.path,
        "metric": meter.metric,
        "reference": opened.run.data.name if meter.has_data else "the teacher's samples",
        **settings.fixed(),
        "seeds": settings.seeds,
        "rows": rows,
        "not_compared": refused,
    }
    report.write(folder, results, say)
    return results


def _absolute(path: str) -> str:
    return path if is_remote(path) else str(Path(path).expanduser().absolute())


def _scales(teacher: SavedRun, settings: Settings) -> tuple[tuple[float, ...], str]:
    """The guidance scales of the students, and why there is only one."""
    own = float(teacher.config.sample.guidance)
    if not teacher.run.guided:
        if settings.guidance and set(settings.guidance) != {1.0}:
            raise ValueError("guidance needs a teacher conditioned on classes or text; leave --guidance out")
        return (1.0,), "not swept: the teacher is conditioned on neither classes nor text"
    if settings.guidance:
        return tuple(dict.fromkeys(settings.guidance)), ""
    if own == 1.0:
        return (1.0,), "students learn the teacher without guidance, as its config says; --guidance=1,2 trains both"
    return (1.0, own), ""


# ------------------------------------------------------------------------------------------ rows


def _teacher_rows(
    teacher: SavedRun, meter: Meter, settings: Settings, folder: Path, say: students.Say
) -> list[Record | None]:
    """The teacher with its own sampler, with every solver at few evaluations, and with guidance."""
    rows = [_teacher_row(teacher, meter, folder, "teacher", teacher.config, say)]
    for name in settings.solvers:
        solver, _, first = name.partition("+")
        afs = choose(first, ("", "afs"), "addition to a solver") == "afs"
        for nfe in dict.fromkeys((*settings.nfe, *MORE)):
            if nfe == 1 and name != settings.solvers[0]:
                continue  # D(x, sigma_max) for every solver
            config = _with_solver(teacher.config, solver, nfe, afs)
            if config is not None:
                rows.append(_teacher_row(teacher, meter, folder, name, config, say))
    null_trained = teacher.config.teacher.kind != "run" or teacher.config.diffusion.cond_dropout > 0
    if teacher.run.guided and null_trained:
        for scale in dict.fromkeys((*SCALES, *settings.guidance)):
            if scale != teacher.config.sample.guidance:
                config = ConfigDict(teacher.config.to_dict())
                config.sample.guidance = scale
                rows.append(_teacher_row(teacher, meter, folder, "teacher", config, say))
    return rows


def _with_solver(config: ConfigDict, solver: str, nfe: int, afs: bool) -> ConfigDict | None:
    """The teacher's config with another solver of `nfe` evaluations; None if the solver cannot take that number."""
    changed = ConfigDict(config.to_dict())
    c = changed.sample
    c.solver, c.options, c.afs, c.final_denoise, c.guidance = solver, ConfigDict(), afs, True, 1.0
    try:
        return with_nfe(changed, nfe)
    except ValueError:
        return None


def _teacher_row(
    teacher: SavedRun, meter: Meter, folder: Path, name: str, config: ConfigDict, say: students.Say
) -> Record | None:
    try:
        saved = teacher.rebuilt(config, teacher.run.data)
    except ValueError:
        return None
    run, scale = saved.run, float(config.sample.guidance)
    stem = f"{name}_{run.nfe}_{scale:g}"
    solver = f"{name}, {config.sample.solver}" if name == "teacher" else name

    def make() -> Record:
        row, images = meter(Sampler(run, teacher.mesh), teacher.params)
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(folder / f"{stem}.npz", images=images)
        say(f"{solver}, {run.nfe} evaluations: {meter.metric} {row['quality']:.4g}")
        return {"sampler": solver, "guidance": scale, "trained": False, **row, "shown": f"teacher/{stem}.npz"}

    return stored(folder / f"{stem}.json", make)


def _final(trainer: Callable[[], students.Trainer], rate: float, seed: int) -> Record:
    return trainer().final(rate, seed)


def _student_rows(
    made: students.Student, guidance: float, settings: Settings, meter: Meter, root: Path, say: students.Say
) -> list[Record]:
    """The rows of one method, means over the seeds; what is in its folder is not done again."""
    folder = root / (made.method if guidance == 1.0 else f"{made.method}_{guidance:g}")
    found: list[students.Trainer] = []

    def trainer() -> students.Trainer:
        if not found:
            found.append(students.Trainer(made, settings, meter, folder, say))
        return found[0]

    argument = {"method": made.name}
    check_folder(folder, argument)
    say(f"{made.name}: {settings.budget} of training per student")
    chosen = stored(folder / "search.json", lambda: trainer().search())
    seeds = []
    for seed in range(1, settings.seeds + 1):
        seeds.append(stored(folder / f"seed{seed}.json", partial(_final, trainer, chosen["rate"], seed)))
        for row in seeds[-1]["rows"]:
            say(f"  {made.name}, seed {seed}, {row['nfe']} evaluations: {meter.metric} {row['quality']:.4g}")
    how = {"sampler": made.name, "method": made.method, "guidance": guidance, "trained": True}
    how |= {"data": students.needs_data(made.config)}
    how |= {"rate": chosen["rate"], "recipe_rate": chosen["recipe_rate"], "tried": chosen["tried"]}
    shown = [f"{folder.name}/seed1/shown_{row['nfe']}.npz" for row in seeds[0]["rows"]]
    return [{**how, **row, "shown": name} for row, name in zip(report.over_seeds(seeds), shown, strict=True)]
