"""Result files: NAME.json with the settings beside the results, NAME.png with the figure."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

FILES = ("data", "images", "weights", "inception", "lpips")
PATHS = ("teacher", "out", "workdir", "state", "work", "run", *FILES)  # flags that name files of one machine


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """The flags of a study, without the paths of this machine."""
    return {name: value for name, value in vars(args).items() if name not in PATHS}


def save(folder: str | Path, name: str, record: Mapping[str, Any], figure: Any = None) -> None:
    """Write the record as JSON, and the figure beside it."""
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=2, default=str)
    (out / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    written = f"{name}.json"
    if figure is not None:
        figure.tight_layout()
        figure.savefig(out / f"{name}.png", dpi=100)
        plt.close(figure)
        written += f" and {name}.png"
    print(f"\nwrote {written} to {out}")
