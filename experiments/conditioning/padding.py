"""How the unused slots of short captions are filled: hidden by a mask, zeros, copies of tokens, noisy copies.

    python experiments/conditioning/padding.py [--steps=2000] [--seeds=3] [--length=32] [--out=runs/experiments]

Captions have 9 tokens with their start, the networks see --length.
"""

from __future__ import annotations

from study import Variant, parse, parser, report

CLAIM = "noisy copies beat zeros in FID and CLIP score; here: not worse than zeros in caption accuracy"


def main() -> None:
    p = parser(__doc__, steps=2000)
    p.add_argument("--length", type=int, default=32, help="of texts, padding included")
    args = parse(p)
    curves, marks = {}, {}
    for name in ("mask", "zero", "replicate", "noisy"):
        padding = "" if name == "mask" else name
        variant = Variant(args, {"data.options.caption_text": (args.length, 64), "cond.padding": padding})
        print(f"{name}:", flush=True)
        curves[name], marks[name] = variant.curves(), variant.marks
    report(args, "padding", CLAIM, curves, marks, "caption")


if __name__ == "__main__":
    main()
