"""What the studies of features share: their flags, and the network they look into."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdiff import training
from jaxdiff.configs import creatures
from jaxdiff.features import Catalog, select
from jaxdiff.features.commands import subject_of, table_of
from jaxdiff.features.scoring import Subject
from jaxdiff.training import export


def parse(p: argparse.ArgumentParser) -> argparse.Namespace:
    """The flags that all studies have, beside those of `p`."""
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.add_argument("--workdir", default="runs/creatures", help="a run of configs/creatures.py")
    p.add_argument("--data", default="", help="a file of pictures (sets.py) instead of new creatures")
    p.add_argument("--out", default="runs/experiments", help="folder for the JSON and PNG files")
    p.add_argument("--tiny", action="store_true", help="an untrained small network and few images, to try the script")
    args = p.parse_args()
    if not args.tiny and not Path(args.workdir).is_dir():
        p.error(f"no run at {args.workdir}: jaxdiff train --config=configs/creatures.py --workdir={args.workdir}")
    return args


def load(args: argparse.Namespace) -> tuple[Any, Catalog, tuple[str, ...], Subject]:
    """Config, catalogue, the names of all activations that lie over the image, and the network."""
    config = creatures.get_config("dit") if args.tiny else export.read_config(Path(args.workdir))
    if args.tiny:
        config.model.fields.update(depth=2, width=16, heads=2)
    job = training.build(config)
    table = table_of(job)
    names = tuple(name for name in select(table, "**") if table[name].grid)
    if not args.tiny:
        return config, table, names, subject_of(job, args.workdir)
    images, rng = jnp.zeros((1, *job.dataset.image_shape)), np.random.default_rng(0)
    shapes = jax.eval_shape(job.model.init, jax.random.key(0), images, jnp.ones(1))["params"]
    params = jax.tree.map(lambda leaf: 0.2 * rng.standard_normal(leaf.shape, np.float32), shapes)
    return config, table, names, Subject(job.model, params)
