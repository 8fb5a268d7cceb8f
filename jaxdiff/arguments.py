"""The arguments of a config, --config=NAME:FIRST,SECOND, checked against those it declares in ARGUMENTS."""

from __future__ import annotations

from collections.abc import Mapping

from jaxdiff.errors import nearest


def arguments(arg: str, allowed: Mapping[str, str]) -> list[str]:
    """The arguments of NAME:FIRST,SECOND; undeclared ones are refused."""
    given = [part.strip() for part in arg.split(",") if part.strip()]
    for part in given:
        if part not in allowed:
            names = ", ".join(allowed) or "none"
            raise ValueError(f"unknown config argument {part!r}{nearest(part, allowed)}; this config takes {names}")
    return given


def argument(arg: str, allowed: Mapping[str, str]) -> str:
    """The argument of a config whose arguments are mutually exclusive, or ""."""
    given = arguments(arg, allowed)
    if len(given) > 1:
        raise ValueError(f"this config takes one of {', '.join(allowed)}, got {arg!r}")
    return given[0] if given else ""
