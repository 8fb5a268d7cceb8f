"""Studies of experiments/ run as their command lines do, at tiny size."""

import importlib
import json
import math
import sys

import pytest


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """`run("emd.digits", *flags) -> (results, printed text)`; every number of the results must be finite."""

    def study(name, *flags):
        module = importlib.import_module(f"experiments.{name}")
        monkeypatch.setattr(sys, "argv", [name, "--tiny", f"--out={tmp_path}", *flags])
        module.main()
        (results,) = tmp_path.glob("*.json")
        assert results.with_suffix(".png").stat().st_size > 1000
        found = json.loads(results.read_text())
        assert all(math.isfinite(x) for x in numbers(found))
        return found, capsys.readouterr().out

    return study


def numbers(tree):
    """Every float in nested dicts and lists."""
    if isinstance(tree, dict | list):
        for leaf in tree.values() if isinstance(tree, dict) else tree:
            yield from numbers(leaf)
    elif isinstance(tree, float):
        yield tree
