"""FID of CIFAR-10's training images against its test images by the protocol of EDM and ADM; resumable.

    python -m experiments.evaluation.fid_cifar10 DATA OUT [subset first full]

DATA holds inception_fid.npz and cifar10_train.npz, cifar10_test.npz (`images_pd`, see released_weights.py). OUT keeps
the features of each image as it is done; run the command again to resume. Figures, each printed when it is complete and
appended to OUT/figures.jsonl:

    subset   5,000 of each by np.random.RandomState(2020).choice(n, 5000, replace=False); published: 10.3233274
    first    the first 5,000 of each, with precision and recall (k = 3, training images as the generated ones)
    full     50,000 against 10,000; about 3.15 in the literature
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np

from experiments.common.photos import from_deltas
from jaxdiff.evaluation import FeatureCache, Protocol, digest, evaluate_features, extract_cached, feature_net, write
from jaxdiff.evaluation.prdc import prdc

SPLITS = {"train": 50_000, "test": 10_000}
BATCH = 32
FIGURES = {
    "subset": lambda n: np.random.RandomState(2020).choice(n, 5000, replace=False),
    "first": lambda n: np.arange(5000),
    "full": np.arange,
}


def main(arguments: list[str]) -> None:
    if len(arguments) < 2 or not Path(arguments[0]).is_dir():
        raise SystemExit(f"give the folder of data and weights and one for results, got {arguments}\n\n{__doc__}")
    data, out = Path(arguments[0]), Path(arguments[1])
    wanted = arguments[2:] or list(FIGURES)
    unknown = [name for name in wanted if name not in FIGURES]
    if unknown:
        raise SystemExit(f"unknown figures {unknown}; choose from {', '.join(FIGURES)}")
    files = {split: data / f"cifar10_{split}.npz" for split in SPLITS}
    for path in (*files.values(), data / "inception_fid.npz"):
        if not path.is_file():
            raise SystemExit(f"there is no {path}\n\n{__doc__}")
    net = feature_net("inception", data / "inception_fid.npz", resize="tensorflow")
    cache = FeatureCache(out, net)
    images = {}
    for split, path in files.items():
        with np.load(path, allow_pickle=False) as arrays:
            images[split] = from_deltas(arrays["images_pd"])
    for name in wanted:
        chosen = {split: FIGURES[name](n) for split, n in SPLITS.items()}
        found = {}
        for split in ("test", "train"):
            found[split] = extract_cached(cache, stream(images[split], chosen[split], f"{name}/{split}"), keep=True)
        protocol = Protocol(
            feature_net=net.name, feature_sha256=net.sha256, resize=net.resize, uint8=True,
            samples=len(chosen["train"]), reference="cifar10 test", reference_sha256=digest(files["test"]),
            reference_samples=len(chosen["test"]), solver=None, steps=None, nfe=None,
            guidance=None, seed=None, ema=None,
            notes=f"figure {name!r}: training images in the place of samples",
        )  # fmt: skip
        record = evaluate_features(found["train"].moments, found["test"].moments, protocol)
        if name == "first":
            record |= prdc(found["test"].features, found["train"].features, k=3)
        print({key: value for key, value in record.items() if key != "protocol"}, flush=True)
        write(out / "figures.jsonl", {"figure": name, **record, "protocol": dataclasses.asdict(protocol)})


def stream(images: np.ndarray, indices: np.ndarray, what: str):
    for start in range(0, len(indices), BATCH):
        if start // BATCH % 16 == 0:
            print(f"{what} {start} of {len(indices)}", flush=True)
        yield images[indices[start : start + BATCH]]


if __name__ == "__main__":
    main(sys.argv[1:])
