"""Runs a study of experiments/ as its command line would, at tiny size."""

import json
import math
import runpy
import sys
from pathlib import Path

EXPERIMENTS = Path(__file__).resolve().parents[1] / "experiments"
BESIDE = (
    "lab",
    "networks",
    "pictures",
    "sets",
    "study",
    "variants",
)  # modules beside the scripts, imported by their bare names


def studies(folder, monkeypatch, capsys, tmp_path):
    """`study(name, *flags) -> (results, printed text)`; every number must be finite."""
    monkeypatch.syspath_prepend(folder)

    def study(name, *flags):
        monkeypatch.setattr(sys, "argv", [name, "--tiny", f"--out={tmp_path}", *flags])
        runpy.run_path(str(folder / f"{name}.py"), run_name="__main__")
        (results,) = tmp_path.glob("*.json")
        assert results.with_suffix(".png").stat().st_size > 1000
        found = json.loads(results.read_text())
        assert all(math.isfinite(x) for x in numbers(found))
        return found, capsys.readouterr().out

    return study


def forget():
    for name in BESIDE:
        sys.modules.pop(name, None)


def numbers(tree):
    if isinstance(tree, dict | list):
        for leaf in tree.values() if isinstance(tree, dict) else tree:
            yield from numbers(leaf)
    elif isinstance(tree, float):
        yield tree
