"""Tables of scores over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any


def spread(values: Sequence[float]) -> float:
    """Standard deviation over seeds; 0 for one seed."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def cell(values: Sequence[float]) -> str:
    """mean ± sd, or the value when there is one."""
    mean = f"{statistics.mean(values):.3f}"
    return f"{mean} ± {spread(values):.3f}" if len(values) > 1 else mean


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print an aligned table, its first column to the left."""
    table = [list(columns), *([str(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(columns))]
    print(f"\n{title}")
    for first, *others in table:
        right = [text.rjust(width) for text, width in zip(others, widths[1:], strict=True)]
        print("  ".join([first.ljust(widths[0]), *right]), flush=True)


def show_verdicts(verdicts: Mapping[str, bool]) -> None:
    """Print each claim and whether it held."""
    for claim, held in verdicts.items():
        print(f"{'held' if held else 'NOT HELD'}: {claim}")
