"""Selecting activations: by name patterns, by a filter on their properties, by comparison.

pattern   up*/**/cross_attention/q     * within a part of a name, ** across parts, ? one character
          re:^up[01]_.*/out$           a regular expression, found anywhere
          !**/norm*                    excluded, wherever it is in the list
          up-level1-repeat2-res-out    a name of the reference implementation, in networks that have it (reference.py)
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxdiff.features import attention_maps
from jaxdiff.features.catalog import INTER_MODULE, Catalog, Tap
from jaxdiff.features.reference import reference_names
from jaxdiff.features.statistics import cka
from jaxdiff.trees import AnyArray

Patterns = str | Sequence[str]
HIDDEN = {"map": ("/map", f"/{attention_maps.NAME}"), "modulation": ("/modulation",)}  # from patterns without the word


def select(names: Iterable[str], patterns: Patterns) -> tuple[str, ...]:
    """The names that some pattern matches and no exclusion does, in their own order (of a catalogue: of execution).

    Attention maps are larger than everything else together, and the modulation of a block is no feature: only patterns
    that contain "map" or "modulation" match them. With exclusions alone, everything else is selected. A pattern that
    matches nothing is an error. A list of `SELECTIONS` is a list of patterns.
    """
    names = list(names)
    patterns = _translated(names, [patterns] if isinstance(patterns, str) else list(patterns))
    wanted = [pattern for pattern in patterns if not pattern.startswith("!")] or ["**"] * bool(patterns)
    kept = set().union(*(_matches(names, pattern) for pattern in wanted))
    for pattern in patterns:
        if pattern.startswith("!"):
            kept -= _matches(names, pattern[1:], all_kinds=True)
    if not kept:
        raise ValueError(f"{patterns} select nothing of {len(names)} activations; exclude fewer, or add patterns")
    return tuple(name for name in names if name in kept)


def _translated(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """The patterns, reference names replaced by ours."""
    known = reference_names(names)
    pairs = [("!" * pattern.startswith("!"), pattern.removeprefix("!")) for pattern in patterns]
    return [mark + known.get(pattern, pattern) for mark, pattern in pairs]


def _matches(names: Sequence[str], pattern: str, all_kinds: bool = False) -> set[str]:
    expression = pattern.removeprefix("re:") if pattern.startswith("re:") else _from_glob(pattern)
    matched = {name for name in names if re.search(expression, name)}
    if not matched:
        raise ValueError(_nothing(names, pattern))
    if all_kinds:
        return matched
    hidden = [ends for word, ends in HIDDEN.items() if word not in pattern]
    return {name for name in matched if not any(name.endswith(ends) for ends in hidden)}


def _from_glob(pattern: str) -> str:
    parts = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    pieces = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
    return "^" + "".join(parts.get(piece, re.escape(piece)) for piece in pieces) + "$"


def _nothing(names: Sequence[str], pattern: str) -> str:
    plain = re.sub(r"^re:|[\^$]", "", pattern)
    near = difflib.get_close_matches(plain, [*names, *reference_names(names)], n=3, cutoff=0.4)
    known = sorted({name.rsplit("/", 1)[-1] for name in names if "/" in name})
    nearest = f"names end in {', '.join(known)}"
    if near:
        nearest = f"similar names are {', '.join(near)}"
    if re.match(r"(unet|down|mid|up|vit|attn)-", plain) and not reference_names(names):
        nearest = f"such names are those of Stable Diffusion's UNets and PixArt, this network has none; {nearest}"
    return f"no activation of {len(names)} matches {pattern!r}; {nearest} (* does not match /, ** does)"


# ------------------------------------------------------------------------------------------ by what they are


@dataclasses.dataclass(frozen=True)
class Filter:
    """The three properties of Meng et al. 2024 as rules, with thresholds from our own pilot study.

    P1, noise: activations of other stages and those that leak noise are dropped. Where the leak was not measured, those
    whose noise-to-signal ratio exceeds `max_noise_ratio` times the least of an inter-module output in these stages.
    P2, granularity: the first module of each resolution is too coarse, except from the finest one with attention
    on, where what has just been upsampled holds the least noise.
    P3, locality: queries and keys of self-attention resemble their neighbours, except at the finest such grid.
    Grids coarser than `min_grid` of the input's side are dropped; for latents at 1/8 of the image size use 1/4.
    """

    stages: tuple[str, ...] = ("up", "blocks")
    max_leak: float = 0.2
    max_noise_ratio: float = 5.0
    min_grid: float = 1 / 32
    skip_first: bool = True
    local_kinds: tuple[str, ...] = ("self_q", "self_k")

    def reasons(self, table: Catalog, measured: Mapping[str, Mapping[str, float]] | None = None) -> dict[str, str]:
        """Why each activation is dropped, "" if it is kept. `measured[name]` may hold `leak` and `nsr`."""
        measured = measured or {}
        largest = max(_side(tap) for tap in table.values())
        finest = max((_side(tap) for tap in table.values() if tap.kind == "self_q"), default=largest)
        first_modules = self._first_module_per_grid(table)
        min_trunk_nsr = self._min_trunk_nsr(table, measured)
        image = _side(table["in"])
        return {
            name: self._shape_reason(tap, image, finest, name.split("/")[0] == first_modules.get(tap.grid))
            or self._noise_reason(measured.get(name, {}), min_trunk_nsr)
            for name, tap in table.items()
        }

    def _shape_reason(self, tap: Tap, image: int, finest: int, first: bool) -> str:
        if tap.stage not in self.stages:
            return f"stage {tap.stage}"
        if tap.grid is None:
            return f"{tap.kind} has no spatial grid"
        if _side(tap) < self.min_grid * image:
            return f"grid {tap.grid[0]}x{tap.grid[1]} is too coarse"
        if self.skip_first and first and _side(tap) < finest:
            return "first module of its resolution"
        if tap.kind in self.local_kinds and _side(tap) < finest:
            return f"{tap.kind} below the finest attention"
        return ""

    def _noise_reason(self, measured: Mapping[str, float], min_trunk_nsr: float) -> str:
        if "leak" in measured:
            if measured["leak"] > self.max_leak:
                return f"noise leak {measured['leak']:.2f}"
        elif measured.get("nsr", 0.0) > self.max_noise_ratio * min_trunk_nsr:
            return f"noise-to-signal {measured['nsr']:.2f}"
        return ""

    def _first_module_per_grid(self, table: Catalog) -> dict[tuple[int, int] | None, str]:
        """The first module on each grid, within the stages."""
        inside = [tap for tap in table.values() if tap.stage in self.stages and tap.grid]
        return {tap.grid: tap.name.split("/")[0] for tap in reversed(inside)}

    def _min_trunk_nsr(self, table: Catalog, measured: Mapping[str, Mapping[str, float]]) -> float:
        trunk = [tap.name for tap in table.values() if tap.kind in INTER_MODULE and tap.stage in self.stages]
        return min((measured[name]["nsr"] for name in trunk if "nsr" in measured.get(name, {})), default=math.inf)

    def keep(self, table: Catalog, measured: Mapping[str, Mapping[str, float]] | None = None) -> tuple[str, ...]:
        """The names that pass, in order of execution."""
        return tuple(name for name, reason in self.reasons(table, measured).items() if not reason)


def _side(tap: Tap) -> int:
    return max(tap.grid or (0,))


def prune(features: Mapping[str, AnyArray], max_cka: float = 0.95) -> tuple[str, ...]:
    """Names of features [n h w c] without those too similar to an earlier one on the same grid."""
    kept: list[str] = []
    for name, value in features.items():
        rivals = [other for other in kept if features[other].shape[:-1] == value.shape[:-1]]
        if all(cka(features[other], value) <= max_cka for other in rivals):
            kept.append(name)
    return tuple(kept)


# ------------------------------------------------------------------------------------------ by comparison


class Score(NamedTuple):
    """The score of a list of activations: one value per seed in each data regime."""

    values: dict[str, list[float]]

    @property
    def by_seed(self) -> list[float]:
        """Means over the regimes."""
        return [statistics.fmean(run) for run in zip(*self.values.values(), strict=True)]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.by_seed)

    def gain(self, other: Score) -> tuple[float, float]:
        """Mean and standard error of the difference to another score, seed by seed."""
        gaps = [a - b for a, b in zip(self.by_seed, other.by_seed, strict=True)]
        return statistics.fmean(gaps), statistics.stdev(gaps) / math.sqrt(len(gaps))


class Selection(NamedTuple):
    """Selected activations, their score, and the score of every candidate alone."""

    names: tuple[str, ...]
    score: Score
    alone: dict[str, Score]
    steps: tuple[tuple[tuple[str, ...], Score], ...]  # the accepted intermediate lists

    def save(self, path: str | os.PathLike) -> None:
        """Write it as JSON, for `load_selection`."""
        steps = [{"names": names, "values": score.values} for names, score in self.steps]
        alone = {name: score.values for name, score in self.alone.items()}
        record = {"names": self.names, "mean": self.score.mean, "steps": steps, "alone": alone}
        Path(path).write_text(json.dumps(record, indent=1), encoding="utf-8")


def load_selection(path: str | os.PathLike) -> Selection:
    """What `Selection.save` wrote."""
    record = json.loads(Path(path).read_text(encoding="utf-8"))
    steps = tuple((tuple(step["names"]), Score(step["values"])) for step in record["steps"])
    alone = {name: Score(values) for name, values in record["alone"].items()}
    return Selection(tuple(record["names"]), steps[-1][1], alone, steps)


def compare(
    table: Catalog,
    candidates: Sequence[str],
    score: Callable[[tuple[str, ...], int], Mapping[str, float]],
    *,
    seeds: Sequence[int] = (0, 1, 2),
    per_grid: int = 2,
    margin: float = 1.0,
) -> Selection:
    """Score every candidate alone, then greedily combine the best `per_grid` of each resolution.

    `score(names, seed)` gives a value per data regime, higher is better. Starting from the best, the one
    with the largest gain is added while its mean gain over seeds exceeds `margin` standard errors. Names stay in
    order of execution.
    """
    if not candidates or len(seeds) < 2:
        raise ValueError(f"compare needs candidates and 2 seeds or more, got {len(candidates)} and {len(seeds)}")

    def run(names: Iterable[str]) -> tuple[tuple[str, ...], Score]:
        ordered = tuple(sorted(names, key=lambda name: table[name].order))
        runs = [score(ordered, seed) for seed in seeds]
        return ordered, Score({regime: [float(values[regime]) for values in runs] for regime in runs[0]})

    alone = {name: run([name])[1] for name in candidates}
    pool = _best_per_grid(table, alone, per_grid)
    steps: list[tuple[tuple[str, ...], Score]] = [((pool[0],), alone[pool[0]])]
    while rest := [name for name in pool if name not in steps[-1][0]]:
        names, best = max((run([*steps[-1][0], name]) for name in rest), key=lambda tried: tried[1].mean)
        gain, error = best.gain(steps[-1][1])
        if gain <= margin * error:
            break
        steps.append((names, best))
    return Selection(*steps[-1], alone, tuple(steps))


def _best_per_grid(table: Catalog, alone: Mapping[str, Score], count: int) -> list[str]:
    """The best `count` of each grid, best first."""
    ranked = sorted(alone, key=lambda name: -alone[name].mean)
    grids = [table[name].grid for name in ranked]
    return [name for i, name in enumerate(ranked) if grids[:i].count(grids[i]) < count]
