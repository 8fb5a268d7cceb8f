"""How the unused slots of short captions are filled: hidden by a mask, zeros, copies of tokens, noisy copies.

    python -m experiments.conditioning.padding [--steps=400] [--seeds=3] [--length=24] [--out=runs/experiments]

Captions have 9 tokens with their start; the networks see --length.
"""

from __future__ import annotations

from experiments.conditioning.variant import Variant, chosen, parse, parser, report

CLAIM = "noisy copies beat zeros in FID and CLIP score; here: not worse than zeros in caption accuracy"


def main() -> None:
    p = parser(__doc__, steps=400)
    p.add_argument("--length", type=int, default=24, help="of captions, padding included")
    args = parse(p)
    variants = {}
    for name in chosen(args, ("mask", "zero", "replicate", "noisy")):
        padding = "" if name == "mask" else name
        variant = Variant(args, {"data.options.caption_text": (args.length, 64), "cond.padding": padding})
        variants[name] = variant.train_all(name)
    report(args, "padding", CLAIM, variants, "caption")


if __name__ == "__main__":
    main()
