"""What the studies of conditioning share: small text-to-image trainings on rendered shapes, scored by their captions.

Scores are shares of samples whose colours, shapes and places, read from the picture, are those of the caption
(`data.caption_scores`): a stand-in for CLIP scores that can be measured here. `loss` is that of the averaged parameters
on pictures that no training sees, with the same noise levels and noises at every mark of every variant. Captions say
"left of" alone: with "right of" as often, a side is the exclusive or of two words, and the network was still at chance
after 2,500 steps.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from lab import cell, plt, show
from PIL import Image

from jaxdiff import training
from jaxdiff.configs import t2i_small
from jaxdiff.errors import pick
from jaxdiff.training import transfer
from jaxdiff.training.logs import captioned_grid

SIZE, PATCH, DEPTH, TOKENS = 8, 4, 2, 9
HELD = 1024  # pictures behind each loss


def parser(doc: str | None, steps: int) -> argparse.ArgumentParser:
    """The flags of every study."""
    p = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, default=steps, help="of each training")
    p.add_argument("--marks", type=int, default=6, help="times a training is looked at, evenly spaced")
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--width", type=int, default=64, help="of the transformers")
    p.add_argument("--samples", type=int, default=256, help="images behind each score")
    p.add_argument("--only", nargs="+", default=[], help="names of the variants to train; all if none are given")
    p.add_argument("--out", default="runs/experiments")
    p.add_argument("--tiny", action="store_true", help="a few steps of a small network, to try the script")
    return p


def parse(p: argparse.ArgumentParser) -> argparse.Namespace:
    args = p.parse_args()
    if args.tiny:
        args.steps, args.marks, args.samples, args.seeds, args.width = 4, 2, 8, 1, 16
    if not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", str(Path("~/.cache/jaxdiff").expanduser()))
    return args


def chosen(args: argparse.Namespace, variants: Iterable[str]) -> list[str]:
    """The variants that --only names, or all."""
    names = list(variants)
    for name in args.only:
        pick(dict.fromkeys(names), name, "variant")
    return [name for name in names if name in (args.only or names)]


class Variant:
    """configs/t2i_small.py at 8x8 with changes, and its compiled programs, kept over seeds."""

    def __init__(self, args: argparse.Namespace, changes: dict[str, Any], network: str = "mmdit", steps: int = 0):
        config = t2i_small.get_config(f"tiny,{network}" if args.tiny else network)
        steps = steps or args.steps
        with config.unlocked(), config.ignore_type():
            config.data.options.update(size=SIZE, caption_text=(TOKENS, 64), wordings=("left",))
            config.noise.mean, config.optim.learning_rate = math.log(SIZE / 4), 2e-3
            config.optim.warmup_images = config.data.batch_size * (steps // 20)
            config.optim.decay, config.optim.decay_images = "cosine", config.data.batch_size * steps
            config.ema.options.images = config.data.batch_size * steps / 20
            if "patch" in config.model.fields:
                depth = DEPTH + config.model.fields.get("decoder", 0)
                config.model.fields.update(patch=PATCH, width=args.width, depth=depth)
            config.sample.batch_size = args.samples
            config.update_from_flattened_dict(changes)
        self.args, self.config = args, config
        self.marks = [steps * (i + 1) // args.marks for i in range(args.marks)]
        self.job = training.build(config)
        others = config.copy_and_resolve_references()
        with others.unlocked():
            others.data.options.update(draw=1, count=min(HELD, config.data.options.count))
        self.held = training.build(others).dataset
        self.step = jax.jit(self.job.method.step, donate_argnums=0)
        self.loss = jax.jit(lambda state, batch, key: self.job.method.step(state, batch, key)[1]["loss"])
        self.draw = training.sampler(self.job, "random")
        self.data_at: Callable[[int], Any] = lambda step: self.job.dataset
        self.states: list[Any] = []  # after the last mark, by seed
        self.scores: list[list[dict[str, float]]] = []  # by seed and mark
        self.drawn: tuple[Any, list[str]] = ((), [])  # the last images that were scored, and their captions

    def train(
        self, seed: int, start: dict[str, Any] | None = None, watch: Callable[[int, Any], None] | None = None
    ) -> Any:
        """The state after the last mark, from parameters `start` by name where given; `watch(step, state)` at marks.

        All variants of a seed see the same pictures, noise levels and noises.
        """
        key, size = jax.random.key(seed), self.config.data.batch_size
        state = jax.jit(self.job.method.init)(key, self.job.dataset.batch(0, size))
        if start is not None:
            kept = transfer.fit(start, state.params, "the smaller run")
            state = state.replace(**{name: transfer.put(kept, state.params) for name in ("params", "ema")})
        for step in range(1, self.marks[-1] + 1):
            batch = self.data_at(step).batch(seed * 1_000_000 + step, size)
            state, _ = self.step(state, batch, jax.random.fold_in(key, step))
            if watch is not None and step in self.marks:
                watch(step, state)
        return state

    def images(self, state: Any, seed: int) -> np.ndarray:
        """Samples, and in `drawn` what they were asked to show: captions, or the pairs that their labels name."""
        parts = list(training.sample(self.job, state, self.args.samples, 1000 + seed, run=self.draw))
        images = np.concatenate([images for images, _ in parts])
        labels = None if parts[0][1] is None else np.concatenate([drawn for _, drawn in parts])
        self.drawn = images, training.captions(self.job, len(images), labels)
        return images

    def score(self, state: Any, seed: int) -> dict[str, float]:
        """How well samples follow their captions, and the loss."""
        self.images(state, seed)
        averaged, size = state.replace(params=state.ema), self.config.data.batch_size
        steps = range(self.held.size // size)
        parts = [self.loss(averaged, self.held.batch(i, size), jax.random.key(i)) for i in steps]
        return self.job.dataset.judge(*self.drawn) | {"loss": float(np.mean(parts))}

    def run(self, name: str, starts: Sequence[Any] = ()) -> Variant:
        """Trains and scores every seed; seed i starts from starts[i] where given."""
        print(f"{name}:", flush=True)
        for seed in range(self.args.seeds):
            scores: list[dict[str, float]] = []
            watch = lambda step, state: scores.append(self.score(state, seed))  # noqa: B023, E731
            self.states.append(self.train(seed, starts[seed] if starts else None, watch))
            self.scores.append(scores)
            print(f"  seed {seed}: {', '.join(f'{k} {v:.3f}' for k, v in scores[-1].items())}", flush=True)
        return self


def report(args: Any, name: str, claim: str, runs: dict[str, Variant], key: str, **more: Any) -> None:
    """The last scores of each variant, the figure of `key` by steps, samples of the last seed, and the JSON file."""
    keys = list(next(iter(runs.values())).scores[0][-1])
    rows = [[variant, *(cell([seed[-1][k] for seed in run.scores]) for k in keys)] for variant, run in runs.items()]
    title = f"{name}: shares of samples that follow their captions, {args.seeds} seeds, {args.samples} samples"
    show(title, ["", *keys], rows)
    print(f"\nthe paper: {claim}")
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    record = {
        "settings": {k: v for k, v in vars(args).items() if k != "out"},
        "marks": {variant: run.marks for variant, run in runs.items()},
        "scores": {variant: run.scores for variant, run in runs.items()},
        **more,
    }
    (out / f"conditioning_{name}.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    figure, axis = plt.subplots(figsize=(7, 4.5))
    for variant, run in runs.items():
        values = np.asarray([[mark[key] for mark in seed] for seed in run.scores])
        axis.errorbar(run.marks, values.mean(0), values.std(0), marker="o", markersize=3, capsize=2, label=variant)
        grid = captioned_grid(run.drawn[0][:16], run.drawn[1][:16], columns=4)
        Image.fromarray(grid).save(out / f"conditioning_{name}_{re.sub(r'[^a-z0-9.]+', '_', variant)}.png")
    axis.set(xlabel="training steps", ylabel=key)
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out / f"conditioning_{name}.png", dpi=100)
    plt.close(figure)
    print(f"wrote conditioning_{name}.json, .png and samples to {out}")
