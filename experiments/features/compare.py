"""Dense tasks from single activations and lists of them: correspondence, segmentation with few labels, selections.

    python -m experiments.features.compare --workdir=runs/creatures [--sigma=0.1] [--test=60] [--seeds=3]
    python -m experiments.features.compare --workdir=RUN --data=horse_seg128.npz

segment     mean IoU of a linear map from pixels' features to parts, fitted to 8 labelled images
warp        keypoints of an image found in the same image, turned, scaled and shifted; PCK@0.1 of the image
semantic    keypoints found in another creature; PCK@0.1 of the image, and of the creature's box

Lists are chosen by `features.compare` on images of their own, from inter-module outputs (the choice of earlier work),
from all activations, and from those the filter keeps; they are judged on further images. Every seed has other labelled
images. --data=FILE takes other images than creatures, shrunk to the network's size: labelled.py says what a file holds.
"""

from __future__ import annotations

import argparse
from functools import cache, partial
from pathlib import Path
from statistics import mean
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import ndimage

from experiments.common import results
from experiments.common.results import plt
from experiments.common.tables import cell, show
from experiments.features.labelled import Labelled, get
from experiments.features.subjects import load, parse
from jaxdiff import features
from jaxdiff.features import probes, scoring
from jaxdiff.features.statistics import fit_ridge

LABELLED = 8  # images, of each seed


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--sigma", type=float, default=0.1)
    p.add_argument("--seeds", type=int, default=3, help="draws of labelled images")
    p.add_argument("--test", type=int, default=60, help="images to choose by, and as many to judge by")
    args = parse(p)
    if args.tiny:
        args.test, args.seeds = 6, 2
    subject, side, table, names = load(args)
    made = get(args.data, LABELLED * args.seeds + 2 * args.test, side)
    record: dict[str, Any] = {"settings": results.settings(args)}
    if made.masks is not None:
        found = subject.collect(made.images, names, args.sigma)
        wide = {name: resized(f, made.masks.shape[1:]) for name, f in found.items()}
        measured = scoring.noise_in(subject, made.images[:32], names, args.sigma)
        kept = [name for name in features.Filter().keep(table, measured) if name in found]
        record |= select(args, table, {"filtered": kept, "filtered, pruned": pruned(found, kept)}, wide, made)
        record["heads"] = heads(args, made, found, wide, record["lists"]["all"]["names"])
    if made.points is not None:
        record["correspondence"] = correspond(subject, made, table, names, args)
    save(args, table, record)


# ------------------------------------------------------------------------------------------ segmentation


def resized(f: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    return np.asarray(jax.image.resize(f, (len(f), *size, f.shape[-1]), "bilinear"))


def pruned(found: Any, names: Any) -> list[str]:
    return list(features.prune({name: found[name] for name in names}))


def segment(wide: Any, made: Labelled, args: Any, names: Any, seed: int, judge: bool = False) -> dict[str, float]:
    """Mean IoU of a list of activations, on the images to choose by or those to judge by."""
    start = LABELLED * args.seeds + args.test * judge
    few, test = slice(LABELLED * seed, LABELLED * (seed + 1)), slice(start, start + args.test)
    x, x_test = (np.concatenate([wide[name][rows] for name in names], -1, dtype=float) for rows in (few, test))
    predict = fit_ridge(x.reshape(-1, x.shape[-1]), np.eye(made.classes)[made.masks[few].ravel()], 1e-2)
    predicted = predict(x_test.reshape(-1, x.shape[-1])).argmax(-1)
    return {"miou": probes.mean_iou(predicted, made.masks[test], made.classes)}


def select(args: Any, table: Any, filtered: dict[str, list[str]], wide: Any, made: Labelled) -> dict[str, Any]:
    """The best activation and the best list of several sets of candidates, and what the filter kept of the best ten."""
    conventional = [name for name in wide if table[name].kind in features.INTER_MODULE]
    score = cache(partial(segment, wide, made, args))
    seeds, rows, lists = range(args.seeds), [], {}
    sets = {"inter-module": conventional, "all": list(wide), **filtered}
    for label, candidates in ((label, names) for label, names in sets.items() if names):
        chosen = features.compare(table, candidates, score, seeds=seeds)
        single = chosen.steps[0][0]
        alone, together = ([score(few, s, judge=True)["miou"] for s in seeds] for few in (single, chosen.names))
        rows.append([label, len(candidates), cell(alone), len(chosen.names), cell(together)])
        lists[label] = {"candidates": len(candidates), "single": single[0], "judged_single": alone}
        lists[label] |= {"names": chosen.names, "judged": together}
    pixels = [segment({"x": made.images}, made, args, ("x",), s, judge=True)["miou"] for s in seeds]
    columns = ["candidates", "number", "best alone", "length", "list"]
    show(f"mean IoU with {LABELLED} labelled images, {args.seeds} seeds; of pixels {cell(pixels)}", columns, rows)
    for label, row in lists.items():
        print(f"{label}: {', '.join(row['names'])}; alone {row['single']}")
    ranked = {name: mean(score((name,), s)["miou"] for s in seeds) for name in wide}
    top = sorted(ranked, key=ranked.__getitem__)[-10:]
    kept = {label: sum(name in names for name in top) for label, names in filtered.items()}
    for label, number in kept.items():
        print(f"{label}: {len(filtered[label])} of {len(wide)} activations to try, {number} of the best ten among them")
    return {"lists": lists, "pixels": pixels, "top_ten_kept": kept, "alone": ranked}


def heads(args: Any, made: Labelled, found: Any, wide: Any, names: Any) -> dict[str, float]:
    """The list by an ensemble of pixel MLPs with the labels of seed 0, and by a dense head with all to choose by."""
    end = LABELLED * args.seeds
    few, many, test = slice(LABELLED), slice(end, end + args.test), slice(end + args.test, None)
    joined = np.concatenate([wide[name] for name in names], -1)
    ensemble = probes.fit_pixels(joined[few], made.masks[few], made.classes, steps=4 if args.tiny else 500)
    predicted, disagreement = ensemble.predict(joined[test])
    wrong = predicted != made.masks[test]
    some = {name: found[name] for name in names}
    head, params, _ = probes.fit_dense(
        {name: f[many] for name, f in some.items()}, made.masks[many], made.classes, steps=4 if args.tiny else 150
    )
    logits = head.apply({"params": params}, {name: jnp.asarray(f[test]) for name, f in some.items()})
    record = {
        "ensemble": probes.mean_iou(predicted, made.masks[test], made.classes),
        "disagreement_wrong": float(disagreement[wrong].mean()),
        "disagreement_right": float(disagreement[~wrong].mean()),
        "dense": probes.mean_iou(np.asarray(logits).argmax(-1), made.masks[test], made.classes),
    }
    show(
        "the list of all activations, seed 0",
        ["head", "labelled images", "mean IoU"],
        [["10 pixel MLPs", LABELLED, f"{record['ensemble']:.3f}"], ["dense", args.test, f"{record['dense']:.3f}"]],
    )
    print(
        f"members disagree by {record['disagreement_wrong']:.3f} where wrong, {record['disagreement_right']:.3f} else"
    )
    return record


# ------------------------------------------------------------------------------------------ correspondence


def warp(rng: np.random.Generator, image: np.ndarray, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The image and its points (x, y) turned by up to 20 degrees, scaled by 0.85 to 1.15, shifted by up to a tenth."""
    side = image.shape[0]
    angle, scale = rng.uniform(-0.35, 0.35), rng.uniform(0.85, 1.15)
    turn = scale * np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    centre, shift = np.full(2, side / 2 - 0.5), rng.uniform(-0.1, 0.1, 2) * side
    back = np.linalg.inv(turn)[::-1, ::-1]  # of (y, x)
    offset = centre - back @ (centre + shift[::-1])
    planes = [
        ndimage.affine_transform(plane, back, offset, order=1, mode="nearest") for plane in np.moveaxis(image, 2, 0)
    ]
    return np.stack(planes, -1), ((points - centre) @ turn.T + centre + shift).astype(np.float32)


def correspond(subject: Any, made: Labelled, table: Any, names: Any, args: Any) -> dict[str, Any]:
    """PCK@0.1 of pixels and of the activations that were best on half of the pairs, on the other half."""
    images, points, seen = (a[-args.test :] for a in (made.images, made.points, made.seen))
    rng, side = np.random.default_rng(0), images.shape[1]
    moved, ends = (np.stack(part) for part in zip(*map(partial(warp, rng), images, points), strict=True))
    inside = ((ends >= 0) & (ends <= side - 1)).all(-1) & seen
    shared = seen & np.roll(seen, 1, 0)
    both = np.concatenate([images, moved])
    found = {"pixels": both, **subject.collect(both, names, args.sigma, seed=1)}
    image, box = np.full(args.test, side), probes.box_extent(np.roll(made.boxes[-args.test :], 1, 0))
    scores: dict[str, dict[str, list[float]]] = {"warp": {}, "semantic": {}, "semantic, of the box": {}}
    for name, f in found.items():
        a, b = jnp.asarray(f - f.mean((0, 1, 2))).reshape(2, -1, *f.shape[1:])
        match = partial(probes.match, points=jnp.asarray(points), size=(side, side))
        scores["warp"][name] = halves(match(a, b), ends, image, inside)
        other = match(a, jnp.roll(a, 1, 0))
        for task, extent in {"semantic": image, "semantic, of the box": box}.items():
            scores[task][name] = halves(other, np.roll(points, 1, 0), extent, shared)
    rows, best = [], {}
    inner = [name for name in names if table[name].kind in features.INTER_MODULE]
    for task, values in scores.items():
        conventional, best[task] = (max(some, key=lambda name: values[name][0]) for some in (inner, names))
        judged = [values[name][1] for name in ("pixels", conventional, best[task])]
        rows.append([task, *(f"{value:.3f}" for value in judged)])
        rows[-1] += [f"{judged[-1] / max(judged[0], 1e-9):.1f}x", best[task]]
    columns = ["pairs", "pixels", "best inter-module", "best of all", "over pixels", "which"]
    show(f"PCK@0.1, {args.test} pairs, sigma {args.sigma:g}", columns, rows)
    return {
        "pck": scores,
        "best": best,
        "trained": trained(found[best["semantic"]][: args.test], points, seen, side, args),
    }


def halves(found: Any, truth: np.ndarray, extent: np.ndarray, visible: np.ndarray) -> list[float]:
    """PCK of the first half of the pairs, to choose by, and of the second."""
    half = len(truth) // 2
    return [
        probes.pck(found[rows], truth[rows], extent[rows], visible=visible[rows])
        for rows in (slice(half), slice(half, None))
    ]


def trained(f: np.ndarray, points: np.ndarray, seen: np.ndarray, side: int, args: Any) -> float:
    """PCK@0.1 for pairs of creatures after a 3x3 convolution trained on the first half of them, on the other half."""
    half, cell_side = len(f) // 2, side / f.shape[1]
    on_grid = (points + 0.5) / cell_side - 0.5
    pairs = partial(np.roll, shift=1, axis=0)
    first, second = slice(half), slice(half, None)
    shared = [seen[rows] & pairs(seen[rows]) for rows in (first, second)]
    head, params, _ = probes.fit_aggregation(
        f[first], pairs(f[first]), (on_grid[first], pairs(on_grid[first])), shared[0], steps=4 if args.tiny else 150
    )
    out = jnp.asarray(head.apply({"params": params}, jnp.asarray(f[second])))
    match = probes.match(out, jnp.roll(out, 1, 0), jnp.asarray(points[second]), size=(side, side))
    found = probes.pck(match, pairs(points[second]), side, visible=shared[1])
    print(f"semantic pairs after a trained layer on the best activation: {found:.3f}")
    return found


# ------------------------------------------------------------------------------------------ files


def save(args: Any, table: Any, record: dict[str, Any]) -> None:
    """The JSON file, and the score of each activation in the order of execution."""
    name = "_".join(["features_compare", Path(args.workdir).name, *([Path(args.data).stem] if args.data else [])])
    scores, label = record.get("alone"), f"mean IoU, {LABELLED} labelled images"
    if scores is None:
        pck = record["correspondence"]["pck"]["semantic"]
        scores, label = {tap: mean(values) for tap, values in pck.items() if tap in table}, "semantic PCK@0.1"
    figure, axis = plt.subplots(figsize=(8, 4))
    for kind in sorted({table[tap].kind for tap in scores}):
        taps = [tap for tap in scores if table[tap].kind == kind]
        axis.plot([table[tap].order for tap in taps], [scores[tap] for tap in taps], "o", ms=4, label=kind)
    axis.set(xlabel="activation, in order of execution", ylabel=label)
    axis.legend(fontsize=6, ncol=2)
    results.save(args.out, name, record, figure)


if __name__ == "__main__":
    main()
