"""What assigned noise adds to a training step of the CIFAR-10 UNet, all in one run.

    python -m experiments.benchmarks.assignment_overhead [--width=32] [--batch=128] [--rounds=5]

The network is that of configs/cifar10_ddim_immiscible.py at a reduced width (it has 128 channels), on random images. In
each round the step without assignment, the step with it and the assignment alone (cost, solution, gather) take turns;
medians of the rounds' ratios are printed. Target: below 1.02. On an accelerator steps take less and solving differs.
"""

import argparse
from typing import Any

import jax
import optax

from experiments.benchmarks.timing import seconds, spread
from jaxdiff import models, noise
from jaxdiff.configs import cifar10_ddim_immiscible
from jaxdiff.conventions import DDPM
from jaxdiff.methods import Parts, diffusion, optimizers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    config = cifar10_ddim_immiscible.get_config()
    fields = {**config.model.fields.to_dict(), "width": options.width, "channels": 3, "dropout": 0.0}
    model = models.build(config.model.name, **fields)
    batch = {"image": jax.random.uniform(jax.random.key(0), (options.batch, 32, 32, 3), minval=-1.0, maxval=1.0)}
    couple = noise.coupling("hungarian")
    programs: dict[str, Any] = {}
    for name, pair in {"without": None, "with": couple}.items():
        parts = Parts(model, optimizers(optax.adam(2e-4)), convention=DDPM("linear"), couple=pair)
        method = diffusion.build(diffusion.Options(), parts)
        state = jax.jit(method.init)(jax.random.key(1), batch)
        step = jax.jit(method.step).lower(state, batch, jax.random.key(0)).compile()
        programs[name] = lambda step=step, state=state: step(state, batch, jax.random.key(2))
    alone = jax.jit(lambda x0, eps: couple(x0, eps, None, jax.random.key(2)))
    eps = jax.random.normal(jax.random.key(3), batch["image"].shape)
    programs["alone"] = lambda: alone(batch["image"], eps)
    rounds = [{name: seconds(run) for name, run in programs.items()} for _ in range(options.rounds + 1)][1:]  # warm
    print(f"UNet of width {options.width}, batch {options.batch}, median and quartiles of {len(rounds)} rounds")
    print(f"step with assignment / without: {spread([r['with'] / r['without'] for r in rounds])}")
    print(f"assignment and its log alone / step: {spread([r['alone'] / r['without'] for r in rounds], 4)}")


if __name__ == "__main__":
    main()
