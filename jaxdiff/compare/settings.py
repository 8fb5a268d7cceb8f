"""What a comparison is asked for, and the records it keeps between calls."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from jaxdiff.errors import choose

Record: TypeAlias = dict[str, Any]  # what is written as JSON
UNITS = {"s": ("seconds", 1.0), "m": ("seconds", 60.0), "h": ("seconds", 3600.0), "": ("evaluations", 1.0)}


@dataclasses.dataclass(frozen=True)
class Budget:
    """Training of one student: seconds without compilation, or evaluations of the network on one example."""

    amount: float
    unit: str  # seconds, evaluations

    @classmethod
    def read(cls, text: str) -> Budget:
        """300s, 5m, 1h; a bare number such as 2e6 counts evaluations."""
        found = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)([smh]?)", text.strip())
        if found is None or not float(found[1]) > 0:
            raise ValueError(f"a budget is seconds such as 300s or 5m, or evaluations such as 2e6, got {text!r}")
        unit, factor = UNITS[found[2]]
        return cls(float(found[1]) * factor, unit)

    def __str__(self) -> str:
        return f"{self.amount:g} {self.unit}"


@dataclasses.dataclass(frozen=True)
class Settings:
    """How methods are compared."""

    methods: tuple[str, ...]  # NAME or NAME:ARGUMENT, as in --config=sfd:2
    budget: Budget  # of each student, with the search for its learning rate
    seeds: int = 1  # students that are reported per method; the search uses another seed
    nfe: tuple[int, ...] = (1, 2, 4)  # evaluations per sample, where a student or a solver takes them
    samples: int = 2000  # per row
    rates: tuple[float, ...] = (0.3, 1.0, 3.0)  # factors on a recipe's learning rate that are searched
    search: float = 0.3  # share of the budget that the search takes
    solvers: tuple[str, ...] = ("euler", "heun", "ipndm", "ipndm+afs", "dpmpp2m", "unipc")  # without training; +afs:
    #                                                                                   with an analytic first step
    guidance: tuple[float, ...] = ()  # scales that students learn; (): that of the teacher's config, and 1
    shown: int = 10  # samples per row of the grid

    def __post_init__(self) -> None:
        if self.seeds < 1 or self.samples < 2 or not self.nfe or min(self.nfe) < 1:
            raise ValueError(f"seeds and nfe are at least 1, samples at least 2, got {self}")
        if not 0 <= self.search < 1 or not self.rates or min(self.rates) <= 0:
            raise ValueError(f"search is a share below 1 and rates are positive factors, got {self}")
        names = [method.partition(":")[0] for method in self.methods]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{name} is given twice; use one entry per method, such as sfd:2-5")

    def fixed(self) -> Record:
        """What all results of a folder have in common."""
        return {
            "budget": str(self.budget),
            "samples": self.samples,
            "nfe": list(self.nfe),
            "rates": list(self.rates),
            "search": self.search,
        }


def rungs(settings: Settings) -> list[tuple[int, float]]:
    """Successive halving: per rung the number of rates still tried, and the share of the budget that each gets.

    Half of the rates, rounded up, survive a rung; rungs get equal shares, so survivors are trained for longer.
    """
    counts = [len(settings.rates)]
    while counts[-1] > 2:
        counts.append(math.ceil(counts[-1] / 2))
    if counts == [1]:
        return []
    return [(count, settings.search / len(counts) / count) for count in counts]


def stored(path: Path, make: Callable[[], Record]) -> Record:
    """The record at `path`, or the one that `make` gives, written there."""
    if path.is_file():
        return json.loads(path.read_text(encoding="utf-8"))
    record = make()
    write(path, record)
    return record


def write(path: Path, record: Record) -> None:
    """Write JSON atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    part.replace(path)


def check_folder(folder: Path, asked: Record) -> None:
    """A folder holds results of one protocol; what is new in `asked` may only be methods, seeds and scales."""
    found = stored(folder / "compare.json", lambda: asked)
    for name, value in asked.items():
        if found.get(name) != value:
            raise ValueError(
                f"{folder} has results with {name}={found.get(name)!r}, now it is {value!r}; choose another --workdir, "
                "or repeat the earlier value"
            )


def method_name(text: str, known: list[str]) -> str:
    """The method of NAME:ARGUMENT, which has a recipe."""
    return choose(text.partition(":")[0], known, "method with a recipe")
