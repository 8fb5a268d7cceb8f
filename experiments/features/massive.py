"""What the modulation of a DiT's blocks and dropping massive channels do to its features (DiTF, Gan et al. 2025).

    python -m experiments.features.massive --workdir=runs/creatures_dit [--sigma=0.1] [--ratio=10] [--test=120]

For every block, from the residual stream x that enters it:

stream      x itself
modulated   norm0 = LN(x) (1 + scale) + shift, by the block's adaLN
dropped     the same with the massive channels of x set to 0 first

`outlier` is the largest mean magnitude of a channel of x over the median. PCK@0.1 of the same creature, turned, scaled
and shifted, and of another creature, by nearest cosine of features that are not centred. A small network may have no
massive channel, so a second table repeats the measurement with two planted ones: channels of x replaced by `--planted`
medians times 1 + variation n in all tokens, n a unit normal that knows nothing of the image.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.common import results
from experiments.common.results import plt
from experiments.common.tables import show
from experiments.features.compare import warp
from experiments.features.labelled import Labelled, get
from experiments.features.subjects import load, parse
from jaxdiff.features import massive, massive_channels, probes

KINDS = ("stream", "modulated", "dropped")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--sigma", type=float, default=0.1)
    p.add_argument("--ratio", type=float, default=10.0, help="massive channels exceed the median by it")
    p.add_argument("--planted", type=float, default=100.0, help="size of the planted channels, in medians")
    p.add_argument("--variation", type=float, default=0.1, help="of the planted channels from token to token")
    p.add_argument("--test", type=int, default=120, help="pairs of images")
    args = parse(p)
    args.test = 6 if args.tiny else args.test
    subject, side, table, _ = load(args)
    kinds = {name: tap.kind for name, tap in table.items()}
    norms = [name for name in table if name.endswith("/norm0") and massive.modulation_of(name) in table]
    if not norms:
        raise SystemExit(f"{type(subject.model).__name__} has no blocks with adaLN: train --config=creatures:dit")
    pairs = Pairs(get(args.data, args.test, side), args.test)
    streams = {norm: massive.stream_of(kinds, norm) for norm in norms}
    names = [*streams.values(), *(massive.modulation_of(norm) for norm in norms), *norms]
    found = subject.collect(pairs.images, list(dict.fromkeys(names)), args.sigma, seed=1)
    record: dict[str, Any] = {"settings": results.settings(args)}
    for label, size in (("own", 0.0), ("planted", args.planted)):
        rows = {norm: block(args, found, norm, stream, size, pairs) for norm, stream in streams.items()}
        record[label] = rows
        report(label, size, rows, args)
    name = "_".join(["features_massive", Path(args.workdir).name])
    results.save(args.out, name, record, drawn(found, streams))


class Pairs:
    """Images and the same ones warped, their points, and which of those can be found."""

    def __init__(self, made: Labelled, count: int) -> None:
        rng, self.side, self.points = np.random.default_rng(0), made.images.shape[1], made.points
        moved, self.ends = (
            np.stack(part) for part in zip(*map(partial(warp, rng), made.images, made.points), strict=True)
        )
        self.images, self.count = np.concatenate([made.images, moved]).astype(np.float32), count
        self.inside = ((self.ends >= 0) & (self.ends <= self.side - 1)).all(-1) & made.seen
        self.shared = made.seen & np.roll(made.seen, 1, 0)

    def pck(self, f: jax.Array) -> dict[str, float]:
        """PCK@0.1 for the warped image and for another one."""
        a, b = f[: self.count], f[self.count :]
        match = partial(probes.match, points=jnp.asarray(self.points), size=(self.side, self.side))
        other = match(a, jnp.roll(a, 1, 0))
        return {
            "warp": probes.pck(match(a, b), self.ends, self.side, visible=self.inside),
            "semantic": probes.pck(other, np.roll(self.points, 1, 0), self.side, visible=self.shared),
        }


def block(args: Any, found: Any, norm: str, stream: str, planted: float, pairs: Pairs) -> dict[str, Any]:
    """The three kinds of features of one block, with two channels of its stream planted unless the size is 0."""
    x, modulation = jnp.asarray(found[stream]), jnp.asarray(found[massive.modulation_of(norm)])
    if planted:
        unit = jax.random.normal(jax.random.key(0), (*x.shape[:-1], 2))
        loud = planted * jnp.median(jnp.abs(x).mean((0, 1, 2))) * (1 + args.variation * unit)
        x = x.at[..., jnp.asarray([0, x.shape[-1] // 2])].set(loud)
    size = np.abs(np.asarray(x)).mean((0, 1, 2))
    channels = massive_channels(x, args.ratio)
    tokens = x.reshape(len(x), -1, x.shape[-1])
    kinds = {"stream": x}
    for kind, drop in (("modulated", ()), ("dropped", channels)):
        kinds[kind] = massive.modulated(tokens, modulation, drop).reshape(x.shape)
    scores = {kind: pairs.pck(f) for kind, f in kinds.items()}
    return {"outlier": float(size.max() / np.median(size)), "channels": channels, **scores}


def drawn(found: Any, streams: dict[str, str]) -> Any:
    """The channels of each stream by mean magnitude over the median, largest first."""
    figure, axis = plt.subplots(figsize=(6, 4))
    for name in streams.values():
        size = np.abs(found[name]).mean((0, 1, 2))
        axis.plot(np.sort(size)[::-1] / np.median(size), label=name)
    axis.set(xlabel="channel, largest first", ylabel="mean magnitude over the median", yscale="log")
    axis.legend()
    return figure


def report(label: str, size: float, rows: Any, args: Any) -> None:
    """One table: a row per block."""
    title = f"PCK@0.1 (same creature, another creature), {args.test} pairs, sigma {args.sigma:g}"
    if label == "planted":
        title += f", two channels of {size:g} medians (1 + {args.variation:g} n) planted in each stream"
    cells = [
        [norm, f"{row['outlier']:.1f}", len(row["channels"])]
        + [f"{row[kind]['warp']:.3f}, {row[kind]['semantic']:.3f}" for kind in KINDS]
        for norm, row in rows.items()
    ]
    show(title, ["block", "outlier", f"over {args.ratio:g}", *KINDS], cells)


if __name__ == "__main__":
    main()
