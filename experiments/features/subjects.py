"""The networks whose activations are studied, and the flags of the studies."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jaxdiff import training
from jaxdiff.cli.runs import build, subject_of, table_of
from jaxdiff.configs import creatures
from jaxdiff.features import Catalog, select
from jaxdiff.features.scoring import Subject
from jaxdiff.training.parameters import shapes_of


def parse(p: argparse.ArgumentParser) -> argparse.Namespace:
    """The flags that all studies have, beside those of `p`."""
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.add_argument("--workdir", default="runs/creatures", help="a run of configs/creatures.py")
    p.add_argument("--data", default="", help="a file of images (labelled.py) instead of new creatures")
    p.add_argument("--out", default="runs/experiments", help="folder for the JSON and PNG files")
    p.add_argument("--tiny", action="store_true", help="an untrained small network and few images, to try the script")
    args = p.parse_args()
    if not args.tiny and not Path(args.workdir).is_dir():
        p.error(f"no run at {args.workdir}: jaxdiff train --config=configs/creatures.py --workdir={args.workdir}")
    return args


class Studied(NamedTuple):
    """A network, the size of its images, its catalogue, and the activations that lie over the image."""

    subject: Subject
    side: int
    table: Catalog
    names: tuple[str, ...]


def load(args: argparse.Namespace) -> Studied:
    """The network of --workdir, or with --tiny a small one with random parameters."""
    if args.tiny:
        config = creatures.get_config("dit")
        config.model.fields.update(depth=2, width=16, heads=2)
        run = build(config)
        subject = random_subject(run)
    else:
        run = training.load(args.workdir).run
        subject = subject_of(run, args.workdir)
    table = table_of(run)
    names = tuple(name for name in select(table, "**") if table[name].grid)
    return Studied(subject, run.data.shape[0], table, names)


def random_subject(run: training.Run) -> Subject:
    """The run's network with random parameters; fresh ones would start as the identity."""
    rng = np.random.default_rng(0)
    shapes = shapes_of(run.model, run.conditions, run.data.shape)
    params = jax.tree.map(lambda leaf: 0.2 * rng.standard_normal(leaf.shape, np.float32), shapes)
    return Subject(run.model, params, run.convention)
