"""Peak host memory of writing features of 1,000 and of 10,000 images to disk: it should be the same.

    python -m experiments.benchmarks.feature_memory [--counts=1000,10000] [--shard=512]

Each number is extracted by a process of its own, which reports the most memory it ever held. The images are drawn batch
by batch; the network is the UNet of configs/creatures.py with random weights, the features its decoder's outputs.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxdiff import features, models
from jaxdiff.configs import creatures

SHAPE = (64, 16, 16, 3)  # of a batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", default="1000,10000")
    parser.add_argument("--shard", type=int, default=512)
    parser.add_argument("--extract", type=int, default=0, help="extract this many images in this process")
    args = parser.parse_args()
    if args.extract:
        extract(args.extract, args.shard)
        return
    for count in args.counts.split(","):
        command = [sys.executable, "-m", "experiments.benchmarks.feature_memory"]
        subprocess.run([*command, f"--extract={count}", f"--shard={args.shard}"], check=True)


def extract(count: int, shard: int) -> None:
    """Write the features of `count` images and print what that took."""
    model = models.UNet(**creatures.get_config().model.fields.to_dict())
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros(SHAPE), jnp.ones(SHAPE[0]))["params"]
    rng = np.random.default_rng(0)
    sizes = [min(SHAPE[0], count - done) for done in range(0, count, SHAPE[0])]
    batches = (rng.standard_normal((size, *SHAPE[1:]), np.float32) for size in sizes)
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        rows = features.stream(model, params, batches, 0, 0.2, select="dec_*/out")
        features.store.write(Path(folder) / "f", rows, shard)
        stored = sum(path.stat().st_size for path in (Path(folder) / "f").iterdir())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10  # Linux counts KiB
    seconds = time.perf_counter() - begun
    print(f"{count:6d} images: peak {peak:.0f} MiB, {stored / 2**20:.0f} MiB on disk, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
