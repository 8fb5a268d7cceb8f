"""Parsing a compiled program's text: its collectives and memory traffic, with loop bodies counted per iteration.

The compiler's own totals count a loop body once. Here a loop over 28 blocks counts 28 times: the trip count of a `scan`
is the constant its condition compares with; a loop of unknown length counts once.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
BITS = {"pred": 8, "token": 0, "opaque": 0}
# no traffic of their own; loops, branches and calls are counted inside
FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "iota")

_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|\S+) (?P<op>[\w\-]+)\((?P<rest>.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\](?:\{[^}]*\})?")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|called_computations?)=\{?%?([\w.\-]+)")
_BRANCHES = re.compile(
    r"(?:branch_computations=\{([^}]*)\}|true_computation=%?([\w.\-]+), false_computation=%?([\w.\-]+))"
)


class Instruction(NamedTuple):
    """One line of a computation: `name = type op(operands), attributes`."""

    name: str
    type: str
    op: str
    operands: tuple[str, ...]
    attributes: str


class Collective(NamedTuple):
    """One collective: bytes of its result per chip, chips in its group, runs per step."""

    kind: str
    bytes: int
    group: int
    times: int

    @property
    def sent(self) -> float:
        """Bytes a chip sends per step, by the ring algorithm."""
        share = (self.group - 1) / self.group
        ways = {"all-gather": share, "all-reduce": 2 * share, "reduce-scatter": self.group - 1, "all-to-all": share}
        return self.times * self.bytes * ways.get(self.kind, 1.0)


class Program:
    """The computations of a compiled program and how often each runs."""

    def __init__(self, text: str, devices: int) -> None:
        self.devices = devices
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        current: list[Instruction] = []
        for line in text.splitlines():
            head = re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
            if head:
                current = self.computations[head[2]] = []
                self.entry = head[2] if head[1] else self.entry
            elif found := _INSTRUCTION.match(line):
                current.append(_instruction(found))
        self.times: dict[str, int] = {}
        self.fused: set[str] = set()  # inside a kernel: intermediates never reach memory
        self._run(self.entry, 1, False)

    def _run(self, name: str, times: int, fused: bool) -> None:
        self.times[name] = self.times.get(name, 0) + times
        if fused:
            self.fused.add(name)
        for line in self.computations.get(name, ()):
            for called in _called(line):
                repeats = self._trips(line) if line.op == "while" else 1
                self._run(called, times * repeats, fused or line.op not in ("while", "conditional", "call"))

    def _trips(self, loop: Instruction) -> int:
        """The trip count of a `while`: the annotated one, or the constant its counter is compared with."""
        if annotated := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
            return int(annotated[1])
        condition = re.search(r"condition=%?([\w.\-]+)", loop.attributes)
        lines = self.computations.get(condition[1], []) if condition else []
        known = {line.name: line for line in lines}
        for line in lines:
            if line.op == "compare" and "direction=LT" in line.attributes:
                limits = [known[name] for name in line.operands if name in known and known[name].op == "constant"]
                return int(limits[0].attributes.split(")")[0]) if limits else 1
        return 1

    def collectives(self) -> list[Collective]:
        """Every collective of the text; the parts of one that overlaps with compute share a channel and count once."""
        found: dict[str, Collective] = {}
        for name, lines in self.computations.items():
            for line in lines:
                kind = line.op.removesuffix("-start")
                if kind in COLLECTIVES and name in self.times:
                    size = _result(line) if line.op.endswith("-start") else _bytes(line.type)
                    channel = re.search(r"channel_id=(\d+)", line.attributes)
                    one = Collective(kind, size, _group(line.attributes, self.devices), self.times[name])
                    found.setdefault(channel[1] if channel else f"{name}/{line.name}", one)
        return list(found.values())

    def kernels(self) -> dict[str, int]:
        """Runs per step of the kernels that XLA did not generate, by target: attention, cuBLAS, cuDNN."""
        found: dict[str, int] = {}
        for name, lines in self.computations.items():
            for line in lines:
                target = re.search(r'custom_call_target="(tpu_custom_call|__[^"]+)"', line.attributes)
                if target and name in self.times and line.op == "custom-call":
                    found[target[1]] = found.get(target[1], 0) + self.times[name]
        return found

    def transposes(self) -> dict[str, int]:
        """Transpositions that are kernels of their own: how many run per step, and bytes of their results."""
        found = {"per_step": 0, "bytes": 0}
        for name, lines in self.computations.items():
            for line in lines:
                moves = line.op == "transpose" or (line.op == "fusion" and "transpose" in line.name)
                if moves and name in self.times and name not in self.fused:
                    found["per_step"] += self.times[name]
                    found["bytes"] += self.times[name] * _bytes(line.type)
        return found

    def traffic(self) -> int:
        """Bytes between a chip's main memory and its kernels per step."""
        total = 0
        for name, lines in self.computations.items():
            if name in self.times and name not in self.fused:
                known = {line.name: line for line in lines}
                total += self.times[name] * sum(self._moved(line, known) for line in lines)
        return total

    def _moved(self, line: Instruction, known: dict[str, Instruction]) -> int:
        if line.op in FREE or line.op.endswith("-done"):
            return 0
        if line.op.endswith("-start"):
            return _result(line)  # a copy between memories touches main memory once
        body = _called(line)[0] if line.op == "fusion" else ""
        written = self._written(body) if body else None
        total = _bytes(line.type, main=True) if written is None else written
        for position, name in enumerate(line.operands):
            size = _bytes(known[name].type, main=True) if name in known else 0
            if size and body:
                size = min(size, self._read(body, position))
            elif size and line.op in ("dynamic-slice", "slice", "gather") and position == 0:
                size = min(size, _bytes(line.type))
            total += size
        return total

    def _written(self, body: str) -> int | None:
        """Bytes written by a fusion that updates part of an array in place; None: its whole result."""
        lines = self.computations.get(body, [])
        if not lines or lines[-1].op != "dynamic-update-slice":
            return None
        return next((_bytes(line.type) for line in lines if line.name == lines[-1].operands[1]), None)

    def _read(self, body: str, position: int) -> int:
        """Bytes a fusion reads of one operand; only the slices if it is sliced."""
        lines = self.computations.get(body, [])
        parameter = next(
            (line for line in lines if line.op == "parameter" and line.attributes.startswith(f"{position})")), None
        )
        if parameter is None:
            return 0
        total = 0
        for line in lines:
            for place, name in enumerate(line.operands):
                if name != parameter.name:
                    continue
                if line.op in ("dynamic-slice", "slice", "gather") and place == 0:
                    total += _bytes(line.type)
                elif line.op == "fusion":
                    total += self._read(_called(line)[0], place)
                elif line.op != "dynamic-update-slice" or place:
                    total += _bytes(parameter.type)
        return total


def by_kind(collectives: list[Collective]) -> dict[str, dict[str, float]]:
    """Per kind: number in the program, runs per step, bytes of results and bytes sent per chip."""
    table: dict[str, dict[str, float]] = {}
    for one in collectives:
        row = table.setdefault(one.kind, {"in_text": 0, "per_step": 0, "bytes": 0, "sent": 0.0})
        row["in_text"] += 1
        row["per_step"] += one.times
        row["bytes"] += one.times * one.bytes
        row["sent"] += one.sent
    return table


def _instruction(found: re.Match[str]) -> Instruction:
    inside, depth, end = found["rest"], 1, 0
    while depth and end < len(inside):
        depth += (inside[end] in "([{") - (inside[end] in ")]}")
        end += 1
    names = tuple(re.findall(r"%([\w.\-]+)", inside[:end]))
    # the parentheses of a constant or parameter hold its value or number
    attributes = inside if found["op"] in ("constant", "parameter") else inside[end:]
    return Instruction(found["name"], found["type"], found["op"], names, attributes)


def _called(line: Instruction) -> list[str]:
    if line.op in ("while", "fusion", "call", "async-start"):
        return _CALLED.findall(line.attributes)
    if line.op == "conditional":
        names = ",".join(name for found in _BRANCHES.findall(line.attributes) for name in found if name)
        return [name.strip().lstrip("%") for name in names.split(",")]
    return []


def _sizes(type_: str, main: bool = False) -> list[int]:
    """Bytes of each array of a type; with `main`, arrays in other memories, S(1) and so on, count zero."""
    sizes = []
    for found in _ARRAY.finditer(type_):
        kind, shape = found[1], found[2]
        width = re.search(r"\d+", kind)
        bits = BITS.get(kind, int(width[0]) if width else 0)
        if main and re.search(r"S\([1-9]", found[0]):
            bits = 0
        sizes.append(math.prod(int(side) for side in shape.split(",") if side) * bits // 8)
    return sizes


def _bytes(type_: str, main: bool = False) -> int:
    return sum(_sizes(type_, main))


def _result(line: Instruction) -> int:
    """Bytes of an asynchronous instruction's result: its type also lists operands and contexts."""
    sizes = _sizes(line.type)
    if line.op == "all-reduce-start":
        return sum(sizes)
    if line.op == "all-gather-start":
        return sum(sizes[len(sizes) // 2 :])
    return sizes[0] if line.op == "copy-start" or len(sizes) == 1 else sizes[1]


def _group(attributes: str, devices: int) -> int:
    """Chips per replica group, in any of its three notations."""
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", attributes):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        used = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", found[2])
        return math.prod(int(part or sizes[name]) for name, part in used)
    if found := re.search(r"replica_groups=\[(\d+),(\d+)\]", attributes):
        return int(found[2])
    if found := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return found[1].count(",") + 1
    return devices
