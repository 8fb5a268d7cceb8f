"""What a run records about its data: enough to sample without reading the data again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxdiff.conditions import Signal
from jaxdiff.data.captions import HashedText, StoredText, TextEncoder
from jaxdiff.files import DamagedFile, read_json, read_npz, replacing, write_json

FILE, ARRAYS = "data.json", "data.npz"
FIELDS = ("name", "shape", "size", "fingerprint", "class_names", "latent", "text", "example_captions", "signals")
ROOM = 8 * 2**20  # bytes of stored text embeddings


@dataclass(frozen=True, eq=False)
class DataSpec:
    """The shape and the signals of examples, and how prompts are embedded.

    `latent` is the (scale, shift) of latents. `example_captions` and `example_text` belong to the first examples and
    condition samples without a prompt.
    """

    name: str
    shape: tuple[int, ...]
    size: int
    fingerprint: str
    class_names: tuple[str, ...] = field(default=(), repr=False)
    signals: Mapping[str, Signal] = field(default_factory=dict, repr=False)
    latent: tuple[float, float] | None = None
    text: TextEncoder | None = field(default=None, repr=False)
    example_captions: tuple[str, ...] = field(default=(), repr=False)
    example_text: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False)

    @property
    def num_classes(self) -> int:
        """The number of classes; 0 for unlabelled data."""
        return int(self.signals["label"].null) if "label" in self.signals else 0


def write(folder: Path, spec: DataSpec) -> None:
    """Write data.json, and data.npz if there are arrays, atomically."""
    rows = {} if isinstance(spec.text, HashedText) else _bounded(spec.example_text)
    kept = len(next(iter(rows.values()))) if rows else len(spec.example_captions)
    arrays: dict[str, Any] = {f"example/{name}": value for name, value in rows.items()}
    arrays |= {f"null/{n}": s.null for n, s in spec.signals.items() if isinstance(s.null, np.ndarray)}
    record = {
        "name": spec.name,
        "shape": spec.shape,
        "size": spec.size,
        "fingerprint": spec.fingerprint,
        "class_names": spec.class_names,
        "latent": spec.latent,
        "text": spec.text.describe() if isinstance(spec.text, HashedText) else None,
        "example_captions": spec.example_captions[:kept],
        "signals": {name: _plain(signal) for name, signal in spec.signals.items()},
    }
    if arrays:
        with replacing(folder / ARRAYS) as partial:
            np.savez(partial, **arrays)
    write_json(folder / FILE, record)


def read(folder: Path) -> DataSpec | None:
    """The spec of a run; None if it wrote none."""
    path = folder / FILE
    if not path.is_file():
        return None
    record = read_json(path, "the description of a run's data")
    missing = [name for name in FIELDS if name not in record]
    if missing:
        raise DamagedFile(f"{path} has no {', '.join(missing)}: it is not what a run wrote; restore it from a copy")
    arrays = read_npz(folder / ARRAYS) if (folder / ARRAYS).is_file() else {}
    nulls = {name.removeprefix("null/"): value for name, value in arrays.items() if name.startswith("null/")}
    rows = {name.removeprefix("example/"): value for name, value in arrays.items() if name.startswith("example/")}
    signals = {name: _signal(fields, nulls.get(name)) for name, fields in record["signals"].items()}
    captions = tuple(record["example_captions"])
    text: TextEncoder | None = None
    if record["text"]:
        text = HashedText(**record["text"])
        rows = text(captions) if captions else {}
    elif captions:
        text = StoredText(captions, rows, {name: nulls[name] for name in rows}, str(path))
    return DataSpec(
        name=record["name"],
        shape=tuple(record["shape"]),
        size=record["size"],
        fingerprint=record["fingerprint"],
        class_names=tuple(record["class_names"]),
        signals=signals,
        latent=tuple(record["latent"]) if record["latent"] else None,  # type: ignore[arg-type]
        text=text,
        example_captions=captions,
        example_text=rows,
    )


def _bounded(rows: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As many of the rows as fit in ROOM, at least one."""
    each = sum(value[:1].nbytes for value in rows.values())
    count = max(1, ROOM // max(each, 1))
    return {name: np.asarray(value[:count]) for name, value in rows.items()}


def _plain(signal: Signal) -> dict[str, Any]:
    null = None  # arrays are stored in ARRAYS
    if signal.null is not None and not isinstance(signal.null, np.ndarray):
        null = float(signal.null)
    return {"shape": signal.shape, "dtype": signal.dtype, "group": signal.group, "null": null}


def _signal(fields: Mapping[str, Any], null: np.ndarray | None) -> Signal:
    value: Any = null
    if value is None and fields["null"] is not None:
        whole = fields["dtype"].startswith("int")
        value = int(fields["null"]) if whole else fields["null"]
    return Signal(tuple(fields["shape"]), fields["dtype"], value, fields["group"])
