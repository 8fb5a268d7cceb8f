"""Files of real images as the configs read them: .npz with `images` [n 32 32 c] uint8, `labels` and `class_names`.

    python -m experiments.images.prepare fashion_mnist.npz --out=fashion32.npz
    python -m experiments.images.prepare cifar10_train.npz --out=cifar32.npz

A grey file has `x_train` [n 28 28] and `y_train`, and with --split=test `x_test` and `y_test`; its black background
is continued to 32 pixels. A file of colour images has `images_pd`, planes of deltas, and `labels`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from experiments.common.photos import from_deltas

SIDE = 32


def read(path: Path, split: str) -> dict[str, np.ndarray]:
    """The images, labels and class names of a file."""
    with np.load(path, allow_pickle=False) as stored:
        names = stored["class_names"]
        if "images_pd" in stored:
            return {"images": from_deltas(stored["images_pd"]), "labels": stored["labels"], "class_names": names}
        images, labels = stored[f"x_{split}"], stored[f"y_{split}"]
    margin = (SIDE - images.shape[1]) // 2
    images = np.pad(images, ((0, 0), (margin, margin), (margin, margin)))
    return {"images": images[..., None], "labels": labels, "class_names": names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--split", choices=("train", "test"), default="train")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if not args.file.is_file():
        raise SystemExit(f"no file {args.file}")
    arrays = read(args.file, args.split)
    np.savez_compressed(args.out, **arrays)
    print(f"{len(arrays['images'])} images of {arrays['images'].shape[1:]} in {args.out}")


if __name__ == "__main__":
    main()
