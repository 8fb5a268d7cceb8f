"""Every activation at every noise level: what a linear probe of the labels reads off it, how much noise is in it.

    python -m experiments.features.profile --workdir=runs/creatures [--sigmas=0.05,0.1,0.2,0.4,0.8] [--count=600]
    python -m experiments.features.profile --workdir=runs/digits --digits
    python -m experiments.features.profile --workdir=RUN --data=cifar10_test.npz

Meng et al. (2024) see, in Stable Diffusion: noise strong in the down stage, weak in mid and early up, back at the end
of the up stage; coarse to fine within a resolution; queries and keys of self-attention that resemble their neighbours.
Creatures are new ones, not those of training. Noise, granularity and locality are measured at the second level.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common.results import save
from experiments.common.tables import show
from experiments.features.labelled import get
from experiments.features.subjects import load, parse
from jaxdiff import data, features
from jaxdiff.features import Catalog, scoring


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--sigmas", default="0.05,0.1,0.2,0.4,0.8")
    p.add_argument("--count", type=int, default=600, help="images, half of them to fit the probe")
    p.add_argument("--digits", action="store_true", help="probe the embedded digits, for a run of configs/digits.py")
    args = parse(p)
    args.count = 24 if args.tiny else args.count
    sigmas = [float(sigma) for sigma in args.sigmas.split(",")][: 2 if args.tiny else None]
    subject, side, table, names = load(args)
    if args.digits:
        rows, parts = data.load("digits", shuffle=False).take(0, args.count), None
        images, labels = rows["image"], rows["label"]
    else:
        images, labels, parts, *_ = get(args.data, args.count, side)
    accuracy = {sigma: scoring.probe(subject, images, labels, names, sigma) for sigma in sigmas}
    pixels = features.probes.linear_probe((images[::2], labels[::2]), (images[1::2], labels[1::2]))[0]
    noise = {sigma: scoring.noise_in(subject, images[:48], names, sigma) for sigma in sigmas}
    shapes = describe(subject, images[:12], None if parts is None else parts[:12], table, names, sigmas[1])
    report(args, sigmas, table, accuracy, pixels, noise, shapes)


def describe(subject: Any, images: Any, parts: Any, table: Catalog, names: Any, sigma: float) -> dict[str, dict]:
    """Granularity and locality where the grid has at least 8 x 8 cells."""
    fine = [name for name in names if min(table[name].grid) >= 8]
    found = {}
    for name, f in subject.collect(images, fine, sigma, draws=2, average=False).items():
        mean, step = f.mean(1), images.shape[1] // f.shape[2]
        found[name] = {"granularity": features.granularity(f), "neighbours": features.neighbour_locality(mean)}
        if parts is not None:
            found[name]["locality"] = features.locality(mean, parts[:, ::step, ::step])
    return found


def report(
    args: Any, sigmas: list[float], table: Catalog, accuracy: Any, pixels: float, noise: Any, shapes: Any
) -> None:
    """Tables by place and by kind, the heat map and the JSON file."""
    groups: dict[str, list[str]] = {}
    for name in accuracy[sigmas[0]]:
        tap = table[name]
        groups.setdefault(f"{tap.stage} {tap.grid[0]}x{tap.grid[1]}", []).append(name)
    best = lambda group, sigma: f"{max(accuracy[sigma][name] for name in group):.3f}"  # noqa: E731
    columns = [f"sigma {sigma:g}" for sigma in sigmas]
    show(
        f"accuracy of the best activation of each place ({args.count} images; of pixels without noise {pixels:.3f})",
        ["place", "activations", *columns],
        [[place, len(group), *(best(group, sigma) for sigma in sigmas)] for place, group in groups.items()],
    )
    trunk = [
        name for name in accuracy[sigmas[0]] if table[name].kind in ("in", "embedded", "out", *features.INTER_MODULE)
    ]
    level = noise[sigmas[1]]
    show(
        f"along the trunk, noise at sigma {sigmas[1]:g}",
        ["activation", "noise-to-signal", "leak", "cycles per image", *columns],
        [
            [
                name,
                *(f"{level[name][key]:.3f}" for key in ("nsr", "leak")),
                f"{shapes[name]['granularity']:.2f}" if name in shapes else "-",
                *(f"{accuracy[sigma][name]:.3f}" for sigma in sigmas),
            ]
            for name in trunk
        ],
    )
    keys = list(next(iter(shapes.values())))[1:]
    kinds = sorted({table[name].kind for name in shapes})
    of_kind = lambda kind, key: np.mean([row[key] for name, row in shapes.items() if table[name].kind == kind])  # noqa: E731
    rows = [[kind, *(f"{of_kind(kind, key):.2f}" for key in keys)] for kind in kinds]
    show(
        "locality by kind, means (1 = no more alike than any two; labelled: 0 semantic, 1 positional)",
        ["kind", *keys],
        rows,
    )
    selections(table, accuracy, noise)
    name = "_".join(["features_profile", Path(args.workdir).name, *([Path(args.data).stem] if args.data else [])])
    record = {"count": args.count, "pixels": pixels, "accuracy": accuracy, "noise": noise, "shapes": shapes}
    save(args.out, name, record)
    scores = {tap: [accuracy[sigma][tap] for sigma in sigmas] for tap in accuracy[sigmas[0]]}
    features.heat_map(Path(args.out) / f"{name}.png", scores, sigmas, "accuracy of a linear probe")


def selections(table: Catalog, accuracy: Any, noise: Any) -> None:
    """The best activation of all and of the inter-module outputs, and what the filter keeps of the ten best."""
    rows = []
    for sigma, values in accuracy.items():
        ranked = sorted(values, key=values.__getitem__, reverse=True)
        inner = next(name for name in ranked if table[name].kind in features.INTER_MODULE)
        kept = set(features.Filter().keep(table, noise[sigma])) & set(ranked)
        rows.append([f"{sigma:g}", *(f"{values[name]:.3f} {name}" for name in (ranked[0], inner))])
        rows[-1] += [f"{len(kept)} of {len(ranked)}", str(len(kept & set(ranked[:10])))]
    show(
        "selections", ["sigma", "best of all", "best inter-module output", "the filter keeps", "of the best ten"], rows
    )


if __name__ == "__main__":
    main()
