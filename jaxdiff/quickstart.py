"""A tour in minutes on any CPU: train a teacher on the embedded digits, distil it, evaluate and plot samples.

Writes to the workdir: the teacher's run, the students' runs in sfd, sfd_one and emd (all resumable), one grid per row
of the table, results.json and report.html.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np
from ml_collections import ConfigDict

import jaxdiff.configs.digits as digits
import jaxdiff.configs.digits_emd as digits_emd
import jaxdiff.configs.digits_sfd as digits_sfd
from jaxdiff import pages, training
from jaxdiff.methods import exported
from jaxdiff.training.backends import duration
from jaxdiff.training.logs import image_grid, save_png
from jaxdiff.trees import Params

# of the teacher: name, solver, timestamps; all end with x0 = D(x, sigma_min)
ROWS = (
    ("teacher, Heun", "heun", 18),
    ("UniPC", "unipc", 10),
    ("DPM-Solver++(3M)", "dpmpp3m", 10),
    ("iPNDM", "ipndm", 10),
    ("DDIM", "euler", 10),
    ("UniPC", "unipc", 5),
    ("iPNDM", "ipndm", 5),
    ("DDIM", "euler", 5),
)
COLUMNS = ("sampler", "NFE", "Fréchet distance", "recall", "accuracy", "images/s")
Row: TypeAlias = dict[str, Any]  # of the table: COLUMNS, the protocol, a grid of samples


def run(workdir: Path, steps: int | None = None, samples: int | None = None) -> list[Row]:
    """Train (or resume) the teacher and its students, measure them, write the report.

    `steps` shortens the teacher's training, and the students' in proportion.
    """
    teacher, student, one, generator = configs(Path(workdir), steps, samples)
    print(f"[1/5] training a teacher on the embedded digits: {teacher.train.steps} steps, a few minutes on two cores")
    seconds: dict[str, float] = {}
    params = _train(teacher, workdir, seconds)
    if params is None:
        return []
    print(f"\n[2/5] distilling it with SFD-v, for 2 to 5 evaluations: {student.train.steps} iterations")
    few = _train(student, workdir / "sfd", seconds)
    print(f"\n[3/5] distilling that student to 1 evaluation: {one.train.steps} iterations")
    single = None if few is None else _train(one, workdir / "sfd_one", seconds)
    if few is None or single is None:
        return []
    print(f"\n[4/5] distilling the teacher with EMD, for 1 evaluation: {generator.train.steps} updates")
    made = _train(generator, workdir / "emd", seconds)
    if made is None:
        return []
    plan = [(name, solver, _sampled(teacher, solver, n), params) for name, solver, n in ROWS]
    plan += [("SFD-v", "sfd", _sampled(student, "euler", nfe + 2), few) for nfe in reversed(student.sfd.nfe)]
    plan += [("SFD, second stage", "sfd", one, single), ("EMD", "emd", generator, made)]
    print(f"\n[5/5] sampling {teacher.eval.samples} digits with each row's sampler\n{_line(COLUMNS)}")
    rows, start = [], time.monotonic()
    with Progress(len(plan)) as progress:
        for name, file, config, weights in plan:
            row = {"sampler": name, **measure(config, weights)}
            rows.append(row)
            progress.advance(_line(_cells(row)))
            save_png(Path(workdir) / f"{file}_{row['NFE']}.png", row["grid"])
    measuring = time.monotonic() - start
    print(f"seconds of training, with compilation: {', '.join(f'{name} {s:.0f}' for name, s in seconds.items())}")
    write_report(Path(workdir), teacher, rows, seconds, measuring)
    return rows


class Progress:
    """Lines above a bar with the time left, on a terminal; elsewhere the lines alone."""

    def __init__(self, total: int) -> None:
        self.bar: Any = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=total, unit="row", dynamic_ncols=True)

    def __enter__(self) -> Progress:
        return self

    def advance(self, line: str) -> None:
        """Print a line, one step further."""
        if self.bar is None:
            print(line, flush=True)
            return
        self.bar.write(line, file=sys.stdout)
        self.bar.update()

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()


def configs(workdir: Path, steps: int | None, samples: int | None) -> tuple[ConfigDict, ...]:
    """The runs of the teacher, of the SFD-v student, of its second stage and of EMD's generator."""
    teacher, student, one = digits.get_config(), digits_sfd.get_config(), digits_sfd.get_config("second")
    generator = digits_emd.get_config()
    share = (steps or teacher.train.steps) / teacher.train.steps
    paths = {"": teacher, str(workdir): student, str(workdir / "sfd"): one}
    for path, config in (*paths.items(), (str(workdir), generator)):
        with config.unlocked():
            config.train.steps = max(1, round(share * config.train.steps))
            config.eval.samples = samples or config.eval.samples
            config.teacher.path = path
    return teacher, student, one, generator


def _train(config: ConfigDict, workdir: Path, seconds: dict[str, float]) -> Params | None:
    """The exported parameters of a run, or None if it was stopped; its training time is added to `seconds`."""
    start = time.monotonic()
    result = training.train(config, workdir)
    name = "teacher" if config.method.name == "diffusion" else Path(workdir).name
    seconds[name] = time.monotonic() - start
    return None if result.stopped else exported(result.state)


def _sampled(config: ConfigDict, solver: str, timestamps: int) -> ConfigDict:
    config = ConfigDict(config.to_dict())
    config.sample.solver, config.sample.timestamps = solver, timestamps
    return config


def measure(config: ConfigDict, params: Params) -> Row:
    """One row: sample as the config says, compare with the data, time sampling after compilation."""
    run, mesh = training.prepare(config)
    sampler = training.Sampler(run, mesh)
    count = config.eval.samples
    shown, digit = sampler.sample(params, config.sample.batch_size, 0)
    start = time.monotonic()
    images, labels = sampler.sample(params, count, config.eval.seed)
    seconds = time.monotonic() - start
    record = training.evaluate(run, params, mesh, samples=(images, labels))
    assert record is not None and digit is not None
    found = [np.flatnonzero(digit == number)[:10] for number in range(10)]
    picked, first = np.concatenate(found), [int(indices[0]) for indices in found if len(indices)]
    return {
        "NFE": run.nfe,
        "distance": record["frechet_digits"],
        "recall": record["recall"],
        "accuracy": record["accuracy"],
        "images_per_second": count / seconds,
        "protocol": record["protocol"],
        "grid": image_grid(shown[picked], columns=10),
        "strip": image_grid(shown[first], columns=10),
    }


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row["sampler"],
        str(row["NFE"]),
        f"{row['distance']:.2f}",
        f"{row['recall']:.2f}",
        f"{100 * row['accuracy']:.1f} %",
        f"{row['images_per_second']:.0f}",
    )


def _line(cells: tuple[str, ...]) -> str:
    return f"{cells[0]:20s}" + "".join(f"{cell:>18s}" for cell in cells[1:])


def write_report(
    workdir: Path, config: ConfigDict, rows: list[Row], seconds: dict[str, float], measuring: float = 0.0
) -> None:
    """results.json and a self-contained report.html with the images embedded."""
    plain = [{key: value for key, value in row.items() if key not in ("grid", "strip")} for row in rows]
    results = {"rows": plain, "training_seconds": seconds, "measuring_seconds": measuring}
    (workdir / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    net = rows[0]["protocol"]
    note = (
        f"Distance and recall in the features of a digit classifier (sha256 {net['feature_sha256'][:12]}), "
        f"{net['samples']} samples against {net['reference_samples']} digits, rounded to 8 bits, seed {net['seed']}. "
        f"Device: {jax.devices()[0].device_kind}. {config.train.steps} training steps of the teacher."
    )
    names = [f"{row['sampler']}, {row['NFE']} evaluation{'s' * (row['NFE'] > 1)}" for row in rows]
    parts = [
        pages.heading("Quality against network evaluations"),
        f"<figure>{quality(rows)}</figure>",
        pages.table(COLUMNS, [_cells(row) for row in rows]),
        pages.paragraph(note),
        pages.heading("The same noise through every sampler"),
        pages.paragraph("One column per noise and digit: below each other are the images that it becomes."),
        pages.strips({name: row["strip"] for name, row in zip(names, rows, strict=True)}),
        pages.heading("Time of each part"),
        pages.bars({name: (s, duration(s)) for name, s in parts_of(seconds, measuring).items()}),
        pages.paragraph("With compilation. A part that was already finished when the command ran again takes no time."),
        pages.folded(
            "A hundred digits of each sampler",
            *(pages.image(row["grid"], name) for name, row in zip(names, rows, strict=True)),
        ),
    ]
    path = workdir / "report.html"
    path.write_text(pages.page("Digits by jaxdiff", *parts), encoding="utf-8")
    print(f"\nwrote {path}")


def quality(rows: list[Row]) -> str:
    """The plot of distance against evaluations, one line per sampler, the teacher's best as a mark."""
    samplers = dict.fromkeys(row["sampler"] for row in rows if not row["sampler"].startswith("teacher"))
    series = [
        pages.Series(name, [(row["NFE"], max(row["distance"], 1e-3)) for row in rows if row["sampler"] == name])
        for name in samplers
    ]
    marks = {
        f"{row['sampler']}, {row['NFE']} evaluations": max(row["distance"], 1e-3)
        for row in rows
        if row["sampler"].startswith("teacher")
    }
    return pages.plot(series, "network evaluations", "Fréchet distance (lower is better)", marks)


def parts_of(seconds: dict[str, float], measuring: float) -> dict[str, float]:
    """The seconds of each part by what it does."""
    does = {"teacher": "teacher", "sfd": "SFD-v", "sfd_one": "SFD, second stage", "emd": "EMD"}
    found = {f"training: {does.get(name, name)}": value for name, value in seconds.items()}
    return {**found, "sampling and measuring": measuring}
