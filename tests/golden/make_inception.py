"""Makes inception.npz: the FID Inception-v3 as a PyTorch program with seeded weights; run where torch is installed.

    python tests/golden/make_inception.py

Written with torch 2.13.0. Only inputs, outputs and a few means are stored; both sides draw the weights (seeded.py).
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from seeded import draw, images
from torch import nn

HERE = Path(__file__).parent


class Unit(nn.Module):
    """conv, bn, relu under the attribute names of the public state dict."""

    def __init__(self, inputs: int, outputs: int, kernel, stride: int = 1, padding=0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=1e-3)

    def forward(self, x):
        return F.relu(self.bn(self.conv(x)))


class Mixed(nn.Module):
    """A block given as branches; each branch is a list of (name, outputs, kernel, stride) and a pool before it.

    A list in the place of a layer is a fork, whose outputs are joined; a branch without layers is the bare pool.
    """

    def __init__(self, inputs: int, branches: list) -> None:
        super().__init__()
        self.plan = []
        for pool, layers in branches:
            width, names = inputs, []
            for layer in layers:
                fork = layer if isinstance(layer, list) else [layer]
                for name, outputs, kernel, stride in fork:
                    rows, columns = kernel if isinstance(kernel, tuple) else (kernel, kernel)
                    padding = (rows // 2, columns // 2) if stride == 1 else 0
                    setattr(self, name, Unit(width, outputs, (rows, columns), stride, padding))
                width = fork[0][1]
                names.append([name for name, *_ in fork])
            self.plan.append((pool, names))

    def forward(self, x):
        outs = []
        for pool, names in self.plan:
            y = POOLS[pool](x)
            for fork in names:
                y = torch.cat([getattr(self, name)(y) for name in fork], 1)
            outs.append(y)
        return torch.cat(outs, 1)


POOLS = {
    "": lambda x: x,
    "mean": lambda x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False),
    "max": lambda x: F.max_pool2d(x, 3, 1, 1),
    "down": lambda x: F.max_pool2d(x, 3, 2),
}


def five(inputs: int, pooled: int) -> Mixed:
    return Mixed(inputs, [
        ("", [("branch1x1", 64, 1, 1)]),
        ("", [("branch5x5_1", 48, 1, 1), ("branch5x5_2", 64, 5, 1)]),
        ("", [("branch3x3dbl_1", 64, 1, 1), ("branch3x3dbl_2", 96, 3, 1), ("branch3x3dbl_3", 96, 3, 1)]),
        ("mean", [("branch_pool", pooled, 1, 1)]),
    ])  # fmt: skip


def six_a() -> Mixed:
    return Mixed(288, [
        ("", [("branch3x3", 384, 3, 2)]),
        ("", [("branch3x3dbl_1", 64, 1, 1), ("branch3x3dbl_2", 96, 3, 1), ("branch3x3dbl_3", 96, 3, 2)]),
        ("down", []),
    ])  # fmt: skip


def six(width: int) -> Mixed:
    wide, tall = (1, 7), (7, 1)
    double = [(width, 1), (width, tall), (width, wide), (width, tall), (192, wide)]
    return Mixed(768, [
        ("", [("branch1x1", 192, 1, 1)]),
        ("", [("branch7x7_1", width, 1, 1), ("branch7x7_2", width, wide, 1), ("branch7x7_3", 192, tall, 1)]),
        ("", [(f"branch7x7dbl_{i + 1}", outputs, kernel, 1) for i, (outputs, kernel) in enumerate(double)]),
        ("mean", [("branch_pool", 192, 1, 1)]),
    ])  # fmt: skip


def seven_a() -> Mixed:
    shrinking = [("branch7x7x3_1", 192, 1, 1), ("branch7x7x3_2", 192, (1, 7), 1), ("branch7x7x3_3", 192, (7, 1), 1)]
    return Mixed(768, [
        ("", [("branch3x3_1", 192, 1, 1), ("branch3x3_2", 320, 3, 2)]),
        ("", [*shrinking, ("branch7x7x3_4", 192, 3, 2)]),
        ("down", []),
    ])  # fmt: skip


def seven(inputs: int, pool: str) -> Mixed:
    def fork(name: str) -> list:
        return [(f"{name}a", 384, (1, 3), 1), (f"{name}b", 384, (3, 1), 1)]

    return Mixed(inputs, [
        ("", [("branch1x1", 320, 1, 1)]),
        ("", [("branch3x3_1", 384, 1, 1), fork("branch3x3_2")]),
        ("", [("branch3x3dbl_1", 448, 1, 1), ("branch3x3dbl_2", 384, 3, 1), fork("branch3x3dbl_3")]),
        (pool, [("branch_pool", 192, 1, 1)]),
    ])  # fmt: skip


def build() -> nn.Sequential:
    """The whole network up to pool3, then `fc`."""
    layers = {
        "Conv2d_1a_3x3": Unit(3, 32, 3, 2), "Conv2d_2a_3x3": Unit(32, 32, 3), "Conv2d_2b_3x3": Unit(32, 64, 3, 1, 1),
        "pool_1": nn.MaxPool2d(3, 2), "Conv2d_3b_1x1": Unit(64, 80, 1), "Conv2d_4a_3x3": Unit(80, 192, 3),
        "pool_2": nn.MaxPool2d(3, 2), "Mixed_5b": five(192, 32), "Mixed_5c": five(256, 64), "Mixed_5d": five(288, 64),
        "Mixed_6a": six_a(), "Mixed_6b": six(128), "Mixed_6c": six(160), "Mixed_6d": six(160), "Mixed_6e": six(192),
        "Mixed_7a": seven_a(), "Mixed_7b": seven(1280, "mean"), "Mixed_7c": seven(2048, "max"),
    }  # fmt: skip
    net = nn.Sequential()
    for name, layer in layers.items():
        net.add_module(name, layer)
    net.add_module("fc", nn.Linear(2048, 1008))
    return net.eval()


def main() -> None:
    net = build()
    state = {name: value for name, value in net.state_dict().items() if not name.endswith("num_batches_tracked")}
    drawn = {name: torch.from_numpy(draw(name, tuple(value.shape))) for name, value in state.items()}
    net.load_state_dict(drawn, strict=False)
    pixels, arrays = images(1, (2, 40, 52, 3)), {}
    with torch.no_grad():
        x = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
        x = 2 * F.interpolate(x, size=(139, 139), mode="bilinear", align_corners=False) - 1
        for name, layer in net.named_children():
            if name == "fc":
                x = x.mean((2, 3))
                arrays["features"] = x.numpy()
            x = layer(x)
            if name.startswith("Mixed"):
                arrays[f"mean/{name}"] = x.mean((2, 3)).numpy()[:, ::8]
            if name == "Mixed_6d":  # TensorFlow's mixed_6, whose first branch is mixed_6/conv
                arrays["spatial"] = x[:, :7].permute(0, 2, 3, 1).flatten(1).numpy()
    names, shapes = zip(*((name, str(tuple(value.shape))) for name, value in sorted(state.items())), strict=True)
    big, small = (
        F.interpolate(torch.from_numpy(pixels).permute(0, 3, 1, 2).float(), size=(side, side), mode="bilinear")
        for side in (61, 17)
    )
    resized = {f"resized/{side.shape[-1]}": side.permute(0, 2, 3, 1).numpy()[:1] for side in (big, small)}
    np.savez_compressed(
        HERE / "inception.npz", images=pixels, logits=x.numpy(), names=names, shapes=shapes, **resized, **arrays
    )  # fmt: skip


if __name__ == "__main__":
    main()
