"""What checksums cost: their share of saving, restoring and exporting a state.

    python -m experiments.benchmarks.checksums --millions=25

Saves a state of that many parameters with Adam's moments and an average (four copies), as a run does, to a temporary
folder. Prints medians over repeats, in seconds, and the digest's share of each.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np

from jaxdiff.checksums import digest_of
from jaxdiff.methods import TrainState
from jaxdiff.training import export
from jaxdiff.training.checkpoint import Checkpoints
from jaxdiff.training.verify import state_digest


def make_state(millions: float, arrays: int) -> TrainState:
    """Normal numbers, which do not compress."""
    side = int((millions * 1e6 / arrays) ** 0.5)
    keys = jax.random.split(jax.random.key(0), 4)

    def tree(key: jax.Array) -> dict[str, jax.Array]:
        each = jax.random.split(key, arrays)
        return {f"layer{i}": jax.random.normal(each[i], (side, side)) for i in range(arrays)}

    params, mean, square, average = map(tree, keys)
    moments = {"student": {"mean": mean, "square": square}}
    return TrainState(jnp.int32(0), {"student": params}, moments, {"ema": average}, {})


def seconds(action: Callable[[], object]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def measure(millions: float, arrays: int, repeats: int) -> dict[str, float]:
    state = make_state(millions, arrays)
    jax.block_until_ready(state)
    declared = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state)
    names = ("digest", "blocking", "save", "restore", "export", "array digest")
    rows: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder) / "checkpoints", keep=1)
        for step in range(1, repeats + 1):
            current = state.replace(step=jnp.int32(step))
            begun = time.perf_counter()
            checkpoints.save(step, current)
            rows["blocking"].append(time.perf_counter() - begun)
            checkpoints.wait()
            rows["save"].append(time.perf_counter() - begun)
            rows["digest"].append(seconds(lambda current=current: state_digest(current)))
            rows["restore"].append(seconds(lambda step=step: checkpoints.restore(step, declared)))
            params = {name: np.asarray(a) for name, a in state.averages["ema"].items()}
            rows["export"].append(seconds(lambda params=params, step=step: export.write(Path(folder), params, step)))
            rows["array digest"].append(seconds(lambda params=params: digest_of(params)))
        checkpoints.close()
    return {name: median(values) for name, values in rows.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--millions", type=float, default=25.0, help="parameters, in millions")
    parser.add_argument("--arrays", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    found = measure(given.millions, given.arrays, given.repeats)
    size = 16 * given.millions / 1000
    what = f"{given.millions:g} million parameters, {given.arrays} arrays, a state of {size:.2f} GB"
    print(f"{what}, median of {given.repeats}")
    print(f"digest of the state      {found['digest']:.3f} s, {size / found['digest']:.2f} GB/s")
    for name in ("save", "blocking", "restore"):
        print(f"{name:24s} {found[name]:.3f} s, of which the digest {100 * found['digest'] / found[name]:.1f} %")
    share = 100 * found["array digest"] / found["export"]
    print(f"{'export':24s} {found['export']:.3f} s, of which the digest {share:.1f} %")


if __name__ == "__main__":
    main()
