"""Ranges of numbers in configs, methods and models, declared once: in the comment of a field.

    c.train.steps = 1000  # [1, 2**31) optimizer steps in total
    cond_dropout: float = 0.0  # [0, 1) probability of dropping the class or text of an example

A comment that begins with an interval is checked when a run is built, and shown by --help. Infinity and NaN are in no
interval. The entries of a tuple are checked one by one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxdiff import comments
from jaxdiff.errors import is_whole

NUMBER = r"-?(?:inf|[\d.]+(?:\*\*\d+)?)"
INTERVAL = re.compile(rf"([\[(])({NUMBER}), ({NUMBER})([\])])(?: |$)")


class Interval(NamedTuple):
    """An interval as it is written, with its bounds."""

    text: str
    low: float
    high: float

    def __contains__(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
            return False
        if not math.isfinite(value) or not self.low <= value <= self.high:
            return False
        return not ((value == self.low and self.text[0] == "(") or (value == self.high and self.text[-1] == ")"))


def interval_of(comment: str) -> Interval | None:
    """The interval that a comment begins with; None if it begins otherwise."""
    found = INTERVAL.match(comment)
    return found and Interval(found.group().strip(), _number(found[2]), _number(found[3]))


def _number(text: str) -> float:
    base, _, power = text.partition("**")
    return float(base) ** float(power or 1)


@cache
def of_file(path: Path) -> dict[str, str]:
    """The comments of the keys of a config file."""
    return comments.key_comments(path)


@cache
def of_class(cls: type) -> dict[str, str]:
    """The comments of the fields of a dataclass."""
    return comments.field_comments(cls)


def check(values: Mapping[str, Any], noted: Mapping[str, str], prefix: str = "") -> None:
    """Raise a ValueError for the first value outside the interval that its comment declares."""
    for name, comment in noted.items():
        interval = interval_of(comment)
        if interval is None or name not in values:
            continue
        value = values[name]
        wrong = [entry for entry in _entries(value) if entry not in interval]
        if wrong:
            meaning = comment.removeprefix(interval.text).strip()
            which = f"{value!r}" if wrong[0] is value else f"{wrong[0]!r} in {value!r}"
            raise ValueError(
                f"{prefix}{name} must be in {interval.text}, got {which}" + (f" ({meaning})" if meaning else "")
            )


def _entries(value: Any) -> Iterable[Any]:
    return value if isinstance(value, (tuple, list)) else (value,)


def check_kinds(values: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str = "") -> None:
    """Raise a ValueError for the first value that is not of its default's kind: whole, True or False, text, a tuple."""
    for key, default in defaults.items():
        name, value = prefix + key, values[key]
        if isinstance(default, bool) and not isinstance(value, (bool, np.bool_)):
            raise ValueError(f"{name} is True or False, got {value!r}")
        if is_whole(default) and not is_whole(value):
            raise ValueError(f"{name} must be a whole number, got {value!r}")
        if isinstance(default, float) and (isinstance(value, bool) or not isinstance(value, (int, float, np.number))):
            raise ValueError(f"{name} must be a number, got {value!r}")
        if isinstance(default, tuple) and not isinstance(value, (tuple, list)):
            raise ValueError(f"{name} must be a tuple such as {default or (1, 2)}, got {value!r}")
        if isinstance(default, str) and not (isinstance(value, str) or callable(value)):
            raise ValueError(f"{name} must be text such as {default!r}, got {value!r}")
