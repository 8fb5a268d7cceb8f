"""The FID Inception in JAX beside PyTorch with the released weights: features and images per CPU second.

    python -m experiments.evaluation.inception_parity DATA TORCH.npz

TORCH.npz is what `inception_torch` wrote from the same DATA. Exits non-zero if features differ by more than 1e-4. It
also checks that batches of 50 and 128 and eight simulated devices give the same FID between the halves to 1e-6.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.common.photos import from_deltas
from jaxdiff.evaluation import extract, feature_net, frechet_distance

BATCH = 32


def main(arguments: list[str]) -> None:
    if len(arguments) != 2 or not Path(arguments[0]).is_dir() or not Path(arguments[1]).is_file():
        raise SystemExit(f"got {arguments}\n\n{__doc__}")
    data = Path(arguments[0])
    with np.load(arguments[1], allow_pickle=False) as file:
        theirs, seconds, version = file["features"], float(file["seconds"]), str(file["torch"])
    with np.load(data / "cifar10_test.npz", allow_pickle=False) as file:
        images = from_deltas(file["images_pd"][:, : len(theirs)])
    net = feature_net("inception", data / "inception_fid.npz", resize="tensorflow")
    batches = np.split(images, range(BATCH, len(images), BATCH))
    extract(net, batches[:1], batch_size=BATCH)
    begin = time.process_time()
    ours = extract(net, batches, batch_size=BATCH, keep=True).features
    own = time.process_time() - begin
    n = len(images)
    print(f"jax {jax.__version__}: {n / own:.2f} images per CPU second, torch {version}: {n / seconds:.2f}")
    print(f"ratio {seconds / own:.2f}")
    difference = np.abs(ours - theirs).max()
    print(f"largest difference of {n} x 2048 features: {difference:.2e}, the largest is {np.abs(theirs).max():.2f}")
    eight = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    found = {"torch": frechet_distance(*np.split(theirs, 2))}
    for name, size, sharding in (("batches of 50", 50, None), ("of 128", 128, None), ("8 devices", 64, eight)):
        halves = [extract(net, [part], sharding, batch_size=size).moments for part in np.split(images, 2)]
        found[name] = frechet_distance(*halves)
    print("FID of the halves:", ", ".join(f"{name} {value:.7f}" for name, value in found.items()))
    own_values = [value for name, value in found.items() if name != "torch"]
    spread = max(own_values) - min(own_values)
    if difference > 1e-4 or spread > 1e-6 * max(1, found["torch"]):
        raise SystemExit(f"failed: features differ by {difference:.2e}, FID by {spread:.2e}")


if __name__ == "__main__":
    main(sys.argv[1:])
