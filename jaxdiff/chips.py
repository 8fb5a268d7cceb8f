"""Published chip specifications, and the minimum time per step on them (roofline).

`hbm` of a TPU is what its compiler leaves for programs (libtpu 0.0.51 reports it when one does not fit), slightly
less than the published 16, 32, 95 and 32 GB. `link` is the total outgoing bandwidth of a chip.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from jaxdiff.errors import choose

GIB = 2**30


class Chip(NamedTuple):
    """Peak bfloat16 FLOP/s, memory in bytes and bytes/s, links in bytes/s, and their source."""

    flops: float
    hbm: float
    bandwidth: float
    link: float
    source: str

    def times(self, flops: float, traffic: float, sent: float) -> dict[str, float]:
        """Seconds of a chip's arithmetic, memory traffic and communication, each on its own."""
        return {"compute": flops / self.flops, "memory": traffic / self.bandwidth, "links": sent / self.link}


CHIPS = {
    "v4": Chip(275e12, 30.75 * GIB, 1228e9, 300e9, "cloud.google.com/tpu/docs/v4"),
    "v5e": Chip(197e12, 15.75 * GIB, 819e9, 200e9, "cloud.google.com/tpu/docs/v5e"),
    "v5p": Chip(459e12, 95.73 * GIB, 2765e9, 600e9, "cloud.google.com/tpu/docs/v5p"),
    "v6e": Chip(918e12, 31.24 * GIB, 1600e9, 400e9, "cloud.google.com/tpu/docs/v6e"),
    "a100": Chip(312e12, 80e9, 2039e9, 300e9, "NVIDIA A100 80GB SXM data sheet"),
    "h100": Chip(989e12, 80e9, 3350e9, 450e9, "NVIDIA H100 SXM data sheet"),
}
TPUS = ("v4", "v5e", "v5p", "v6e")
# how JAX names the kind of a TPU -> chip
KINDS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
}


def peak_of(device_kind: str) -> float:
    """The published peak FLOP/s of a device in bfloat16; 0 if it is not in the table."""
    if device_kind in KINDS:
        return CHIPS[KINDS[device_kind]].flops
    sxm = re.match(r"NVIDIA (A100|H100)(-SXM\d?.*| 80GB HBM3.*)$", device_kind)  # PCIe forms are slower
    return CHIPS[sxm[1].lower()].flops if sxm else 0.0


class Topology(NamedTuple):
    """A topology by name: `v5e:4x4` is 16 chips of one pod slice, `2*v5e:4x4` two such slices, `h100:8` eight GPUs."""

    name: str
    kind: str
    chips: int
    slices: int = 1

    @property
    def chip(self) -> Chip:
        return CHIPS[self.kind]

    @property
    def tpu(self) -> bool:
        return self.kind in TPUS


def topology(name: str) -> Topology:
    """The topology of a name such as v5e:16x16, v5p:2x2x4, 2*v5e:16x16 or h100:8."""
    count, _, slice_name = name.rpartition("*")
    kind, _, shape = slice_name.partition(":")
    choose(kind, CHIPS, "chip")
    wrong = bool(count) and (kind not in TPUS or not re.fullmatch(r"[1-9]\d*", count))
    if wrong or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape):
        raise ValueError(
            "a topology is CHIP:SHAPE, for example v5e:4x4, v5p:2x2x2 or h100:8, or of TPUs SLICES*CHIP:SHAPE, for "
            f"example 2*v5e:4x4; got {name!r}"
        )
    slices = int(count or 1)
    return Topology(name, kind, slices * math.prod(int(side) for side in shape.split("x")), slices)
