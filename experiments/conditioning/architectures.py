"""Five networks under one config at equal compute: the operations of --steps steps of the MMDiT for each.

    python -m experiments.conditioning.architectures [--steps=800] [--seeds=3] [--out=runs/experiments]

MMDiT, PixArt and the UNet are conditioned on captions, DiT and MDT on the pair of things as a class.
"""

from __future__ import annotations

import jax

from experiments.conditioning.variant import Variant, chosen, parse, parser, report
from jaxdiff.configs import t2i_small
from jaxdiff.training.state import declare

CLAIM = "at equal settings mmDiT leads; DiT, MDTv2, UNet and PixArt follow within a few FID"


def operations(variant: Variant) -> float:
    """Of one training step, as the compiler counts them."""
    arguments = (declare(variant.run, variant.mesh), variant.loop.example, jax.random.key(0))
    program = jax.jit(variant.run.method.step).lower(*arguments).compile()
    return float(program.cost_analysis()["flops"])


def main() -> None:
    args = parse(parser(__doc__, steps=800))
    variants, budget = {}, 0.0
    for network in chosen(args, t2i_small.NETWORKS):
        cost = operations(Variant(args, {}, network))
        budget = budget or cost * args.steps
        variant = Variant(args, {}, network, steps=max(args.marks, round(budget / cost)))
        print(f"{network}: {cost / 1e9:.2f} GFLOP per step, {variant.marks[-1]} steps", flush=True)
        variants[network] = variant.train_all(network)
    report(args, "architectures", CLAIM, variants, "caption")


if __name__ == "__main__":
    main()
