"""Five networks under one config at equal compute: the operations of --steps steps of the MMDiT for each.

    python experiments/conditioning/architectures.py [--steps=800] [--seeds=3] [--out=runs/experiments]

MMDiT, PixArt and the UNet read captions, DiT and MDT are told the pair of things as a class.
"""

from __future__ import annotations

import jax
from study import Variant, chosen, parse, parser, report

from jaxdiff.configs import t2i_small
from jaxdiff.training.trainer import declare

CLAIM = "at equal settings mmDiT leads; DiT, MDTv2, UNet and PixArt follow within a few FID"


def operations(variant: Variant) -> float:
    """Of one training step, as the compiler counts them."""
    state, _ = declare(variant.job)
    batch = variant.job.dataset.batch(0, variant.config.data.batch_size)
    return float(
        jax.jit(variant.job.method.step).lower(state, batch, jax.random.key(0)).compile().cost_analysis()["flops"]
    )


def main() -> None:
    args = parse(parser(__doc__, steps=800))
    runs, budget = {}, 0.0
    for network in chosen(args, t2i_small.NETWORKS):
        cost = operations(Variant(args, {}, network))
        budget = budget or cost * args.steps
        variant = Variant(args, {}, network, steps=max(args.marks, round(budget / cost)))
        print(f"{network}: {cost / 1e9:.2f} GFLOP a step, {variant.marks[-1]} steps", flush=True)
        runs[network] = variant.run(network)
    report(args, "architectures", CLAIM, runs, "caption")


if __name__ == "__main__":
    main()
