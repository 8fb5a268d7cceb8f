"""Makes lpips.npz: LPIPS v0.1 as a PyTorch program with seeded weights; run where torch is installed.

    python tests/golden/make_lpips.py

Written with torch 2.13.0. Both sides draw weights and images (seeded.py); only distances and a gradient are stored.
Resizing is torch's bilinear interpolate with align_corners=False and no antialiasing.
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from seeded import draw, images

HERE = Path(__file__).parent
SHIFT = torch.tensor([-0.030, -0.088, -0.188]).view(1, 3, 1, 1)
SCALE = torch.tensor([0.458, 0.448, 0.450]).view(1, 3, 1, 1)
# (place in torchvision's list, outputs, kernel, stride, padding), "pool", or "out" after a ReLU that is compared
NETS = {
    "alex": [(0, 64, 11, 4, 2), "out", "pool", (3, 192, 5, 1, 2), "out", "pool", (6, 384, 3, 1, 1), "out", (8, 256, 3, 1, 1), "out", (10, 256, 3, 1, 1), "out"],
    "vgg": [
        (0, 64, 3, 1, 1), (2, 64, 3, 1, 1), "out", "pool", (5, 128, 3, 1, 1), (7, 128, 3, 1, 1), "out", "pool",
        (10, 256, 3, 1, 1), (12, 256, 3, 1, 1), (14, 256, 3, 1, 1), "out", "pool",
        (17, 512, 3, 1, 1), (19, 512, 3, 1, 1), (21, 512, 3, 1, 1), "out", "pool",
        (24, 512, 3, 1, 1), (26, 512, 3, 1, 1), (28, 512, 3, 1, 1), "out",
    ],
}  # fmt: skip
CASES = {  # net, pool, resize, shape; images a of seed 1, b of seed 2
    "alex": ("alex", "max", 0, (2, 67, 48, 3)),
    "alex_avg": ("alex", "avg", 0, (2, 40, 40, 3)),
    "alex_resize": ("alex", "max", 64, (2, 16, 24, 3)),
    "vgg": ("vgg", "max", 0, (2, 35, 32, 3)),
    "vgg_avg_resize": ("vgg", "avg", 40, (2, 16, 16, 3)),
    "vgg_shrunk": ("vgg", "max", 32, (2, 50, 77, 3)),
    "alex_grey": ("alex", "max", 0, (2, 32, 32, 1)),
}


def weight(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(draw(name, shape))


def features(x: torch.Tensor, net: str, pool: str) -> list[torch.Tensor]:
    slices, out = 1, []
    for step in NETS[net]:
        if step == "out":
            out.append(x)
            slices += 1
        elif step == "pool":
            x = (F.max_pool2d if pool == "max" else F.avg_pool2d)(x, 3 if net == "alex" else 2, 2)
        else:
            place, outputs, kernel, stride, padding = step
            name = f"net.slice{slices}.{place}"
            kernels = weight(f"{name}.weight", (outputs, x.shape[1], kernel, kernel))
            x = F.relu(F.conv2d(x, kernels, weight(f"{name}.bias", (outputs,)), stride, padding))
    return out


def distance(a: torch.Tensor, b: torch.Tensor, net: str, pool: str, side: int) -> torch.Tensor:
    """Distances [b] of images in [-1, 1], NHWC; heads are absolute values of what is drawn."""
    pair = []
    for x in (a, b):
        x = x.permute(0, 3, 1, 2).expand(-1, 3, -1, -1)
        if side:
            x = F.interpolate(x, size=(side, side), mode="bilinear", align_corners=False, antialias=False)
        pair.append(features((x - SHIFT) / SCALE, net, pool))
    total = torch.zeros(len(a))
    for i, (f, g) in enumerate(zip(*pair, strict=True)):
        f, g = (y / (y.pow(2).sum(1, keepdim=True).sqrt() + 1e-10) for y in (f, g))
        head = weight(f"lin{i}.model.1.weight", (1, f.shape[1], 1, 1)).abs()
        total = total + F.conv2d((f - g) ** 2, head).mean((1, 2, 3))
    return total


if __name__ == "__main__":
    stored = {}
    for name, (net, pool, side, shape) in CASES.items():
        a, b = (torch.from_numpy(images(seed, shape)).float() / 127.5 - 1 for seed in (1, 2))
        a.requires_grad_(name == "alex")
        out = distance(a, b, net, pool, side)
        stored[name] = out.detach().numpy()
        print(name, stored[name])
        if name == "alex":
            out.sum().backward()
            stored["gradient"] = a.grad.numpy()[:, ::6, ::6]
    cases = np.array([repr(case) for case in CASES.values()])
    np.savez_compressed(HERE / "lpips.npz", names=np.array(list(CASES)), cases=cases, **stored)
