"""The benchmarks that print ratios, one after another: their output, one JSON file and one plot.

    python -m experiments.benchmarks.all [--out=benchmarks] [--only=training_step,emd_step] [--rounds=5]

Writes OUT/NAME.json for each, OUT/ratios.json with lower quartile, median and upper quartile of every ratio, and
OUT/ratios.png. Needs torch for the peers and matplotlib for the plot. A benchmark that fails is named at the end, after
the others have run, and makes the exit code 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

BENCHMARKS: dict[str, tuple[str, ...]] = {
    "training_step": (),
    "sfd_peer": (),
    "emd_step": ("--steps=4",),
    "convolutions": ("--quick",),
}
Ratios = dict[str, list[float]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks"))
    parser.add_argument("--only", default=",".join(BENCHMARKS))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    found: Ratios = {}
    failed = []
    for name in options.only.split(","):
        path = options.out / f"{name}.json"
        path.unlink(missing_ok=True)  # of an earlier run
        print(f"\n{name}", flush=True)
        module = [sys.executable, "-m", f"experiments.benchmarks.{name}", *BENCHMARKS[name]]
        if subprocess.run([*module, f"--rounds={options.rounds}", f"--json={path}"], check=False).returncode:
            failed.append(name)
            continue
        found |= dict(leaves(json.loads(path.read_text(encoding="utf-8")), name))
    (options.out / "ratios.json").write_text(json.dumps(found, indent=2), encoding="utf-8")
    if found:
        plot(found, options.out / "ratios.png")
    print(f"\n{len(found)} ratios in {options.out}; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, list[float]]]:
    """Every list of quartiles, by its path."""
    for name, value in tree.items():
        path = f"{prefix} {name}"
        if isinstance(value, Mapping):
            yield from leaves(value, path)
        elif isinstance(value, list):
            yield path, value


def plot(found: Ratios, path: Path) -> None:
    """Medians and quartiles, one row per ratio."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(found)[::-1]
    low, middle, high = zip(*(found[name] for name in names), strict=True)
    figure, axes = plt.subplots(figsize=(8, 1 + 0.2 * len(names)))
    places = range(len(names))
    axes.hlines(places, low, high, color="tab:blue", linewidth=4, alpha=0.4)
    axes.plot(middle, places, "o", color="tab:blue", markersize=4)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(places, names, fontsize=7)
    axes.set_xscale("log")
    axes.set_xlabel("CPU time, ratio (log scale)")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
