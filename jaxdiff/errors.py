"""Messages that say what was given, what is allowed and what to change."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np

T = TypeVar("T")


def pick(table: Mapping[str, T], name: str, what: str) -> T:
    """`table[name]`, or a ValueError that lists the names and the nearest one."""
    if name in table:
        return table[name]
    raise ValueError(f"unknown {what} {name!r}{nearest(name, table)}; choose one of {', '.join(table)}")


def nearest(name: str, names: Iterable[str]) -> str:
    """' (did you mean ...?)' when some name is close, else nothing."""
    close = difflib.get_close_matches(str(name), list(names), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def concrete(value: Any) -> np.ndarray | None:
    """The value as a NumPy array, or None while it is being traced and cannot be looked at."""
    return None if isinstance(value, jax.core.Tracer) else np.asarray(value)


def check_ratio(ratio: float) -> None:
    """Images are `ratio` times as large as those a schedule was made for."""
    if ratio <= 0:
        raise ValueError(f"a resolution ratio must be positive, got {ratio}")


def check_sigma(sigma: Any) -> None:
    """Noise levels must be positive and finite; traced ones are taken on trust."""
    seen = concrete(sigma)
    if seen is not None and not (np.isfinite(seen) & (seen > 0)).all():
        bad = seen[~(np.isfinite(seen) & (seen > 0))].flat[0]
        raise ValueError(
            f"sigma must be positive and finite, got {bad}; x is x0 + sigma * eps, so the clean image is "
            "approached with a small sigma such as 0.002, never with 0"
        )
