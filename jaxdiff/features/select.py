"""From all activations to a few: by patterns of their names, by a filter of what they are, by comparison.

pattern   up*/**/cross_attention/q     * within a part of a name, ** across parts, ? one character
          re:^up[01]_.*/out$           a regular expression, found anywhere
          !**/norm*                    taken away, wherever it stands in the list
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

Patterns = str | Sequence[str]


def select(names: Iterable[str], patterns: Patterns) -> tuple[str, ...]:
    """The names that some pattern matches and no exclusion does, in their own order (of a catalogue: of execution).

    Attention maps outweigh everything else together: only a pattern whose text has "map" in it reaches them. With
    exclusions alone, everything else is selected. A pattern that matches nothing is an error.
    """
    names = list(names)
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    wanted = [pattern for pattern in patterns if not pattern.startswith("!")] or ["**"] * bool(patterns)
    kept = set().union(*(_matches(names, pattern) for pattern in wanted))
    for pattern in patterns:
        if pattern.startswith("!"):
            kept -= _matches(names, pattern[1:], maps=True)
    if not kept:
        raise ValueError(f"{patterns} select nothing of {len(names)} activations; exclude less, or ask for some")
    return tuple(name for name in names if name in kept)


def _matches(names: Sequence[str], pattern: str, maps: bool = False) -> set[str]:
    found = re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else _from_glob(pattern)).search
    matched = {name for name in names if found(name)}
    if not matched:
        raise ValueError(_nothing(names, pattern))
    if maps or "map" in pattern:
        return matched
    return {name for name in matched if not name.endswith("/map")}


def _from_glob(pattern: str) -> str:
    parts = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    pieces = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
    return "^" + "".join(parts.get(piece, re.escape(piece)) for piece in pieces) + "$"


def _nothing(names: Sequence[str], pattern: str) -> str:
    plain = re.sub(r"^re:|[\^$]", "", pattern)
    near = difflib.get_close_matches(plain, names, n=3, cutoff=0.4)
    known = sorted({name.rsplit("/", 1)[-1] for name in names if "/" in name})
    nearest = f"near it are {', '.join(near)}" if near else f"their names end in {', '.join(known)}"
    return (
        f"no activation of {len(names)} matches {pattern!r}; {nearest} (* stays within a part of a name, ** does not)"
    )
