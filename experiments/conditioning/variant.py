"""Small text-to-image trainings on rendered shapes, scored by their captions: what the studies of conditioning share.

Scores are shares of samples whose colours, shapes and places, read from the image, are those of the caption
(`data.caption_scores`): a stand-in for CLIP scores that can be measured here. `loss` is that of the averaged parameters
on images that no training sees, with the same noise levels and noise at every mark of every variant. Captions say
"left of" alone: with "right of" as often, a side is the exclusive or of two words, and the network was still at chance
after 2,500 steps.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from experiments.common import results
from experiments.common.loops import Loop, Watch, marks_of, use_compile_cache
from experiments.common.results import plt
from experiments.common.tables import cell, show
from jaxdiff import training
from jaxdiff.configs import t2i_small
from jaxdiff.data import Dataset
from jaxdiff.errors import choose
from jaxdiff.methods import TrainState, exported
from jaxdiff.training import transfer
from jaxdiff.training.evaluate import eval_sampler
from jaxdiff.training.logs import captioned_grid, save_png
from jaxdiff.training.sampling import all_captions

SIZE, PATCH, DEPTH, TOKENS = 8, 4, 2, 9
HELD_OUT = 1024  # images per loss
Scores = dict[str, float]


def parser(doc: str | None, steps: int) -> argparse.ArgumentParser:
    """The flags of every study of conditioning."""
    p = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, default=steps, help="of each training")
    p.add_argument("--marks", type=int, default=6, help="how often a training is scored, evenly spaced")
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--width", type=int, default=64, help="of the transformers")
    p.add_argument("--samples", type=int, default=256, help="images per score")
    p.add_argument("--only", nargs="+", default=[], help="names of the variants to train (default: all)")
    p.add_argument("--out", default="runs/experiments", help="folder for the JSON and PNG files")
    p.add_argument("--tiny", action="store_true", help="a few steps of a small network, to try the script")
    return p


def parse(p: argparse.ArgumentParser) -> argparse.Namespace:
    """The flags given; compiled programs are kept."""
    args = p.parse_args()
    if args.tiny:
        args.steps, args.marks, args.samples, args.seeds, args.width = 4, 2, 8, 1, 16
    use_compile_cache()
    return args


def chosen(args: argparse.Namespace, variants: Iterable[str]) -> list[str]:
    """The variants that --only names, or all."""
    names = list(variants)
    for name in args.only:
        choose(name, names, "variant")
    return [name for name in names if name in (args.only or names)]


def config_of(args: argparse.Namespace, changes: dict[str, Any], network: str, steps: int) -> ConfigDict:
    """configs/t2i_small.py at 8x8 for so few steps, with changes."""
    config = t2i_small.get_config(f"tiny,{network}" if args.tiny else network)
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
        config.mesh.data = 1
        config.update_from_flattened_dict(changes)
    return config


def held_out(config: ConfigDict) -> Dataset:
    """Images of another draw than those of training."""
    other = config.copy_and_resolve_references()
    with other.unlocked():
        other.data.options.update(draw=1, count=min(HELD_OUT, config.data.options.count))
    return training.load_data(other)


class Variant:
    """A training with changes: its programs, kept over seeds, and what they gave."""

    def __init__(
        self, args: argparse.Namespace, changes: dict[str, Any], network: str = "mmdit", steps: int = 0
    ) -> None:
        steps = steps or args.steps
        self.args = args
        self.config = config_of(args, changes, network, steps)
        self.marks = marks_of(steps, args.marks)
        self.run, self.mesh = training.prepare(self.config, jax.devices()[:1])
        assert isinstance(self.run.data, Dataset)
        self.dataset = self.run.data
        self.data_at: Callable[[int], Dataset] = lambda step: self.dataset
        self.loop = Loop(self.run)
        self._held = held_out(self.config)
        self._loss = jax.jit(lambda state, batch, key: self.run.method.step(state, batch, key)[1]["loss"])
        self._sampler = eval_sampler(self.run, self.mesh)
        self.params: list[Any] = []  # averaged, after the last mark, by seed
        self.scores: list[list[Scores]] = []  # by seed and mark
        self.drawn: tuple[Any, list[str]] = ((), [])  # the last images that were scored, and their captions

    def train(self, seed: int, start: dict[str, Any] | None = None, watch: Watch | None = None) -> TrainState:
        """The state after the last mark, from parameters `start` by name where given.

        All variants of a seed see the same images, noise levels and noise.
        """
        state = self.loop.init(seed)
        if start is not None:
            student = state.params["student"]
            begin = transfer.put(transfer.fit(start, student, "the smaller run"), student)
            state = state.replace(params={"student": begin}, averages={"ema": transfer.put({}, begin)})
        key, steps = jax.random.key(seed), range(1, self.marks[-1] + 1)
        keys = (jax.random.fold_in(key, step) for step in steps)
        batches = (self.batch(self.data_at(step), seed * 1_000_000 + step) for step in steps)
        return self.loop.train(state, batches, keys, marks=self.marks, watch=watch)[0]

    def batch(self, data: Dataset, step: int) -> dict[str, Any]:
        """What the network sees of a batch."""
        return self.run.select(data.batch(step, self.config.data.batch_size))

    def images(self, params: Any, seed: int) -> np.ndarray:
        """Samples; `drawn` keeps them with their captions, or the pairs of things that their labels name."""
        images, labels = self._sampler.sample(params, self.args.samples, 1000 + seed)
        if "text" in self.run.conditions:
            captions = all_captions(self.dataset, len(images))
        else:
            captions = training.captions_of(self.dataset, len(images), labels)
        self.drawn = images, captions
        return images

    def score(self, params: Any, seed: int) -> Scores:
        """How well samples follow their captions."""
        self.images(params, seed)
        assert self.dataset.judge is not None
        return self.dataset.judge(*self.drawn)

    def loss(self, state: TrainState) -> float:
        """The loss of the averaged parameters on the held-out images."""
        averaged = state.replace(params={"student": exported(state)})
        steps = range(self._held.size // self.config.data.batch_size)
        parts = [self._loss(averaged, self.batch(self._held, i), jax.random.key(i)) for i in steps]
        return float(np.mean(parts))

    def train_all(self, name: str, starts: Sequence[Any] = ()) -> Variant:
        """Train and score every seed; seed i starts from starts[i] where given."""
        print(f"{name}:", flush=True)
        for seed in range(self.args.seeds):
            scores: list[Scores] = []

            def watch(step: int, state: TrainState, metrics: Any, seed: int = seed, scores: Any = scores) -> None:
                scores.append(self.score(exported(state), seed) | {"loss": self.loss(state)})

            state = self.train(seed, starts[seed] if starts else None, watch)
            self.params.append(exported(state))
            self.scores.append(scores)
            print(f"  seed {seed}: {', '.join(f'{k} {v:.3f}' for k, v in scores[-1].items())}", flush=True)
        return self


def report(args: Any, name: str, claim: str, variants: dict[str, Variant], key: str, **more: Any) -> None:
    """The last scores of each variant, the figure of `key` by steps, samples of the last seed, and the JSON file."""
    keys = list(next(iter(variants.values())).scores[0][-1])
    rows = []
    for label, variant in variants.items():
        last = [seed[-1] for seed in variant.scores]
        rows.append([label, *(cell([scores[k] for scores in last]) if k in last[0] else "-" for k in keys)])
    title = f"{name}: shares of samples that follow their captions, {args.seeds} seeds, {args.samples} samples"
    show(title, ["", *keys], rows)
    print(f"\nthe paper: {claim}")
    figure, axis = plt.subplots(figsize=(7, 4.5))
    Path(args.out).mkdir(parents=True, exist_ok=True)
    for label, variant in variants.items():
        values = np.asarray([[mark[key] for mark in seed] for seed in variant.scores])
        axis.errorbar(variant.marks, values.mean(0), values.std(0), marker="o", markersize=3, capsize=2, label=label)
        images, captions = variant.drawn
        file = f"conditioning_{name}_{re.sub(r'[^a-z0-9.]+', '_', label)}.png"
        save_png(Path(args.out) / file, captioned_grid(images[:16], captions[:16], columns=4))
    axis.set(xlabel="training steps", ylabel=key)
    axis.legend(fontsize=8)
    record = {
        "settings": results.settings(args),
        "marks": {label: variant.marks for label, variant in variants.items()},
        "scores": {label: variant.scores for label, variant in variants.items()},
        **more,
    }
    results.save(args.out, f"conditioning_{name}", record, figure)
