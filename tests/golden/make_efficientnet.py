"""Makes efficientnet_lite0.npz: EfficientNet-Lite0 as a PyTorch program with seeded weights; run where torch is installed.

    python tests/golden/make_efficientnet.py

Written with torch 2.13.0. Only inputs and outputs are stored; both sides draw the weights (seeded.py), in the HWIO
layout of the folded public file.
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from seeded import draw, images

HERE = Path(__file__).parent
WIDTHS = (16, 24, 24, 40, 40, 80, 80, 80, 112, 112, 112, 192, 192, 192, 192, 320)
STRIDES = (1, 2, 1, 2, 1, 2, 1, 1, 1, 1, 1, 2, 1, 1, 1, 1)
KERNELS = (3, 3, 3, 5, 5, 3, 3, 3, 5, 5, 5, 5, 5, 5, 5, 3)


def conv(x: torch.Tensor, name: str, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> torch.Tensor:
    """A convolution with the padding TensorFlow calls SAME: the odd pixel goes to the bottom and the right."""
    weight = draw(f"{name}.kernel", (kernel, kernel, x.shape[1] // groups, outputs))
    bias = draw(f"{name}.bias", (outputs,))
    pads = []
    for size in (x.shape[3], x.shape[2]):
        total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
        pads += [total // 2, total - total // 2]
    weight = torch.from_numpy(weight).permute(3, 2, 0, 1)
    return F.conv2d(F.pad(x, pads), weight, torch.from_numpy(bias), stride=stride, groups=groups)


def run(pixels: np.ndarray, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.from_numpy(pixels).permute(0, 3, 1, 2).float()
    x = (F.interpolate(x, size=(side, side), mode="bilinear") - 127) / 128
    x = F.relu6(conv(x, "stem", 32, 3, 2))
    for i, (width, stride, kernel) in enumerate(zip(WIDTHS, STRIDES, KERNELS, strict=True)):
        y = x if i == 0 else F.relu6(conv(x, f"block{i}.expand", 6 * x.shape[1]))
        y = F.relu6(conv(y, f"block{i}.depthwise", y.shape[1], kernel, stride, groups=y.shape[1]))
        y = conv(y, f"block{i}.project", width)
        x = x + y if stride == 1 and x.shape[1] == width else y
    features = F.relu6(conv(x, "head", 1280)).mean((2, 3))
    weight, bias = torch.from_numpy(draw("fc.kernel", (1280, 1000))), torch.from_numpy(draw("fc.bias", (1000,)))
    return features, features @ weight + bias


if __name__ == "__main__":
    pixels = images(2, (2, 32, 32, 3))
    features, logits = run(pixels, 75)
    np.savez_compressed(
        HERE / "efficientnet_lite0.npz", images=pixels, side=75, features=features.numpy(), logits=logits.numpy()
    )
