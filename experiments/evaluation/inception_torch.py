"""The FID Inception as a PyTorch program, to compare with; run where torch is installed, then `inception_parity`.

    python -m experiments.evaluation.inception_torch DATA OUT.npz [COUNT]

DATA holds inception_fid.npz and cifar10_test.npz. Features of the first COUNT (64) images by TF 1 resizing, and the CPU
seconds they took after one batch to warm up, go to OUT.npz.
"""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path

import numpy as np
import torch

from experiments.common.photos import from_deltas

GOLDEN = Path(__file__).parents[2] / "tests" / "golden"
BATCH, SIDE = 32, 299


def network(path: Path) -> torch.nn.Module:
    """The program of tests/golden/make_inception.py with released weights, up to its features."""
    sys.path.insert(0, str(GOLDEN))
    net = runpy.run_path(str(GOLDEN / "make_inception.py"))["build"]()
    with np.load(path, allow_pickle=False) as arrays:
        state = {name: torch.from_numpy(arrays[name].astype(np.float32)) for name in arrays.files if name[:3] != "fc."}
    net.fc = torch.nn.Identity()
    missing = net.load_state_dict(state, strict=False).missing_keys
    assert all(name.endswith("num_batches_tracked") for name in missing), missing
    return net


def resized(images: np.ndarray) -> torch.Tensor:
    """TF 1's bilinear resizing, pixel i at i * in / out, then (u - 128) / 128."""
    size = images.shape[1]
    centres = np.minimum(np.arange(SIDE) * size / SIDE, size - 1)
    matrix = torch.from_numpy(np.maximum(1 - np.abs(centres[:, None] - np.arange(size)), 0).astype(np.float32))
    x = torch.from_numpy(images).permute(0, 3, 1, 2).float()
    return (torch.einsum("ih,jw,bchw->bcij", matrix, matrix, x) - 128) / 128


def main(arguments: list[str]) -> None:
    if len(arguments) not in (2, 3) or not Path(arguments[0]).is_dir():
        raise SystemExit(f"got {arguments}\n\n{__doc__}")
    data, count = Path(arguments[0]), int(arguments[2]) if len(arguments) == 3 else 64
    with np.load(data / "cifar10_test.npz", allow_pickle=False) as file:
        images = from_deltas(file["images_pd"][:, :count])
    net = network(data / "inception_fid.npz")
    with torch.inference_mode():
        net(resized(images[:BATCH]))
        begin, parts = time.process_time(), []
        for i in range(0, count, BATCH):
            parts.append(net(resized(images[i : i + BATCH])).mean((2, 3)).numpy())
        seconds = time.process_time() - begin
    np.savez(arguments[1], features=np.concatenate(parts), seconds=seconds, torch=torch.__version__)
    print(f"torch {torch.__version__}: {count / seconds:.2f} images per CPU second")


if __name__ == "__main__":
    main(sys.argv[1:])
