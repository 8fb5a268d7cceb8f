"""What a comparison writes: results.json, table.md, two plots, a grid of the same noise through every sampler, and one
HTML page that holds them all."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np

from jaxdiff import pages
from jaxdiff.compare.settings import Record
from jaxdiff.files import read_npz
from jaxdiff.training.logs import image_grid, save_png

MEASURED = ("quality", "to_teacher", "precision", "recall", "accuracy", "images_per_second")
COLUMNS = (
    *("sampler", "NFE", "guidance", "{metric}", "to teacher", "recall", "precision", "images/s"),
    *("training s", "training evaluations", "parameters trained", "data", "learning rate"),
)


def over_seeds(seeds: Sequence[Record]) -> list[Record]:
    """Rows as means over the seeds, with the standard deviations in `spread` and each value in `each`."""
    rows = []
    for same in zip(*(seed["rows"] for seed in seeds), strict=True):
        names = [name for name in MEASURED if name in same[0]]
        values = {name: np.array([row[name] for row in same]) for name in names}
        row = {**same[0], **{name: float(column.mean()) for name, column in values.items()}}
        row["each"] = {name: column.tolist() for name, column in values.items()}
        if len(seeds) > 1:
            row["spread"] = {name: float(column.std(ddof=1)) for name, column in values.items()}
        for name in ("steps", "seconds", "evaluations", "parameters"):
            row[name] = float(np.mean([seed[name] for seed in seeds]))
        rows.append(row)
    return rows


def cells(row: Record) -> tuple[str, ...]:
    """A row of the table, as text."""
    spread = row.get("spread", {})

    def shown(name: str, digits: int = 3) -> str:
        if name not in row:
            return "-"
        text = f"{row[name]:.{digits}g}" if name in ("quality", "to_teacher") else f"{row[name]:.2f}"
        return f"{text} ± {spread[name]:.2g}" if name in spread else text

    cost = ("-", "-", "-", "-", "-")
    if row["trained"]:
        cost = (
            f"{row['seconds']:.0f}",
            f"{row['evaluations']:.3g}",
            f"{row['parameters']:,.0f}",
            "needed" if row["data"] else "not needed",
            f"{row['rate']:.2g}",
        )
    head = (row["sampler"], str(row["nfe"]), f"{row['guidance']:g}")
    return (
        *head,
        *map(shown, ("quality", "to_teacher", "recall", "precision")),
        f"{row['images_per_second']:.0f}",
        *cost,
    )


def write(folder: Path, results: Record, say: Callable[[str], None]) -> None:
    """All files of the report."""
    rows = sorted(results["rows"], key=lambda row: (row["nfe"], row["quality"]))
    (folder / "results.json").write_text(json.dumps({**results, "rows": rows}, indent=2) + "\n", encoding="utf-8")
    head = [column.format(metric=results["metric"]) for column in COLUMNS]
    body = [cells(row) for row in rows]
    text = markdown(head, body)
    (folder / "table.md").write_text(text, encoding="utf-8")
    say(f"\n{text}")
    for name, reason in results["not_compared"].items():
        say(f"{name}: {reason}")
    figures = plots(results, rows)
    for name, svg in figures.items():
        (folder / f"{name}.svg").write_text(svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1))
    path = folder / "report.html"
    path.write_text(page(folder, results, rows, head, body, figures), encoding="utf-8")
    say(f"wrote {path}, results.json, table.md and the plots")


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns."""
    widths = [max(len(line[i]) for line in (head, *body)) for i in range(len(head))]

    def line(values: Sequence[str]) -> str:
        padded = [v.ljust(w) if i == 0 else v.rjust(w) for i, (v, w) in enumerate(zip(values, widths, strict=True))]
        return f"| {' | '.join(padded)} |"

    rule = line(["-" * widths[0], *("-" * (w - 1) + ":" for w in widths[1:])])
    return "\n".join([line(head), rule, *map(line, body)]) + "\n"


def plots(results: Record, rows: Sequence[Record]) -> dict[str, str]:
    """Quality against evaluations per sample, and against the cost of training."""
    metric = f"{results['metric']} to {results['reference']}"
    teacher = next((row for row in rows if row["sampler"].startswith("teacher,") and row["guidance"] == 1.0), None)
    best = {f"teacher, {teacher['nfe']} NFE": teacher["quality"]} if teacher else {}
    names = list(dict.fromkeys(row["sampler"] for row in rows if not row["sampler"].startswith("teacher")))
    few = [
        pages.Series(name, [(row["nfe"], row["quality"]) for row in rows if row["sampler"] == name]) for name in names
    ]
    trained = list(dict.fromkeys(row["sampler"] for row in rows if row["trained"]))
    unit = "seconds" if results["budget"].endswith("seconds") else "evaluations"
    cost = [
        pages.Series(f"{name}, {row['nfe']} NFE", [(value_at_least(row[unit]), row["quality"])], line=False)
        for name in trained
        for row in rows
        if row["sampler"] == name
    ]
    found = {"quality_evaluations": pages.plot(few, "evaluations per sample", metric, best)}
    if cost:
        found["quality_cost"] = pages.plot(cost, f"{unit} of training", metric, best)
    return found


def value_at_least(value: float) -> float:
    """A positive number for a logarithmic axis."""
    return max(value, 1e-3)


def grid(folder: Path, rows: Sequence[Record]) -> tuple[np.ndarray, list[str]] | None:
    """One line of images per sampler, the same noise in each column; None for points and latents."""
    lines, names = [], []
    for row in rows:
        images = read_npz(folder / row["shown"])["images"]
        if images.ndim != 4:
            return None
        lines.append(images)
        names.append(f"{row['sampler']}, {row['nfe']} evaluations")
    return image_grid(np.concatenate(lines), columns=len(lines[0])), names


def page(
    folder: Path,
    results: Record,
    rows: Sequence[Record],
    head: Sequence[str],
    body: Sequence[Sequence[str]],
    figures: dict[str, str],
) -> str:
    """The HTML page."""
    parts = [pages.table(head, body), pages.paragraph(protocol(results, rows))]
    parts += [f"<figure>{svg}</figure>" for svg in figures.values()]
    if results["not_compared"]:
        items = list(results["not_compared"].items())
        parts += [pages.heading("Not compared"), pages.table(("what", "why"), items)]
    made = grid(folder, rows)
    parts.append(pages.heading("The same noise through every sampler"))
    if made is not None:
        pixels, names = made
        save_png(folder / "grid.png", pixels)
        parts.append(
            pages.image(pixels, "From top to bottom: " + "; ".join(names)).replace("<img", '<img class="large"')
        )
    else:
        for row in rows:
            points = read_npz(folder / row["shown"])["images"]
            if points.ndim == 2 and points.shape[1] >= 2:
                parts.append(pages.scatter(points[:, :2], f"{row['sampler']}, {row['nfe']} evaluations"))
    return pages.page(f"Few-step methods on {Path(results['teacher']).name}", *parts)


def protocol(results: Record, rows: Sequence[Record]) -> str:
    """What the numbers are of."""
    known = next((row["protocol"] for row in rows if "protocol" in row), None)
    what = f"{results['metric']} to the teacher's own samples: there are no data to compare with."
    if known is not None:
        net = f"{known['feature_net']} (sha256 {known['feature_sha256'][:12] or '-'})"
        real = f"{known['reference_samples']} of {known['reference']}"
        note = f" {known['notes']}." if known["notes"] else ""
        count, seed = known["samples"], known["seed"]
        what = f"{results['metric']}: features {net}, {count} samples against {real}, seed {seed}.{note}"
    share = f"{100 * results['search']:.0f} %"
    return (
        f"{what} 'To teacher' is the same distance to the teacher's own samples, from other noise. All samplers start "
        f"from the same noise. Each student was trained for {results['budget']}, of which {share} searched its "
        f"learning rate by successive halving over the factors {results['rates']} on its recipe's, on a seed not "
        "reported. Seconds are without compilation; evaluations are FLOPs of training over those of the network on one "
        f"example. Seeds: {results['seeds']}. Device: {jax.devices()[0].device_kind}."
    )
