"""Adam's beta1 and beta2: caption scores after a training of --steps with each pair.

python experiments/conditioning/betas.py [--steps=600] [--seeds=3] [--beta1 0.9 0.95] [--beta2 0.95 0.999]

--network is another of configs/t2i_small.py.
"""

from __future__ import annotations

from study import Variant, chosen, parse, parser, report

CLAIM = "the best of a grid on a UNet was (0.9, 0.95), by a third party's account"


def main() -> None:
    p = parser(__doc__, steps=600)
    p.add_argument("--beta1", type=float, nargs="+", default=[0.9, 0.95, 0.99])
    p.add_argument("--beta2", type=float, nargs="+", default=[0.9, 0.95, 0.99, 0.999])
    p.add_argument("--network", default="latent_unet")
    args = parse(p)
    pairs = {f"{b1}, {b2}": {"optim.options.b1": b1, "optim.options.b2": b2} for b1 in args.beta1 for b2 in args.beta2}
    names = list(pairs)[:2] if args.tiny else chosen(args, pairs)
    runs = {name: Variant(args, pairs[name], args.network).run(name) for name in names}
    report(args, "betas", CLAIM, runs, "caption")


if __name__ == "__main__":
    main()
