"""Makes dinov2.npz: a small DINOv2 as a PyTorch program with seeded weights; run where torch is installed.

    python tests/golden/make_dinov2.py

Written with torch 2.13.0 from the paper and the names of the public checkpoints: ViT-S, B and L differ in width and
depth alone. Only names, inputs and outputs are stored; both sides draw the weights (seeded.py).
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from seeded import images, listing
from seeded import weights as drawn

HERE = Path(__file__).parent
WIDTH, DEPTH, PATCH, GRID, SIDES = 128, 3, 14, 37, (70, 56)
MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])


def shapes() -> dict[str, tuple[int, ...]]:
    d = WIDTH
    found = {"cls_token": (1, 1, d), "pos_embed": (1, GRID**2 + 1, d), "mask_token": (1, d)}
    found |= {"patch_embed.proj.weight": (d, 3, PATCH, PATCH), "patch_embed.proj.bias": (d,)}
    for i in range(DEPTH):
        block = {"norm1.weight": (d,), "norm1.bias": (d,), "attn.qkv.weight": (3 * d, d), "attn.qkv.bias": (3 * d,)}
        block |= {"attn.proj.weight": (d, d), "attn.proj.bias": (d,), "ls1.gamma": (d,)}
        block |= {"norm2.weight": (d,), "norm2.bias": (d,), "mlp.fc1.weight": (4 * d, d), "mlp.fc1.bias": (4 * d,)}
        block |= {"mlp.fc2.weight": (d, 4 * d), "mlp.fc2.bias": (d,), "ls2.gamma": (d,)}
        found |= {f"blocks.{i}.{name}": shape for name, shape in block.items()}
    return found | {"norm.weight": (d,), "norm.bias": (d,)}


def run(w: dict[str, torch.Tensor], pixels: np.ndarray) -> torch.Tensor:
    x = (torch.from_numpy(pixels).float() / 255 - MEAN) / STD
    x = F.conv2d(x.permute(0, 3, 1, 2), w["patch_embed.proj.weight"], w["patch_embed.proj.bias"], stride=PATCH)
    rows, columns = x.shape[2:]
    x = x.flatten(2).transpose(1, 2)
    positions = w["pos_embed"]
    table = positions[:, 1:].reshape(1, GRID, GRID, WIDTH).permute(0, 3, 1, 2)
    factor = ((rows + 0.1) / GRID, (columns + 0.1) / GRID)
    table = F.interpolate(table, scale_factor=factor, mode="bicubic")
    table = table.permute(0, 2, 3, 1).reshape(1, -1, WIDTH)
    x = torch.cat([w["cls_token"].expand(len(x), -1, -1), x], 1) + torch.cat([positions[:, :1], table], 1)
    for i in range(DEPTH):
        p = {name.removeprefix(f"blocks.{i}."): value for name, value in w.items() if name.startswith(f"blocks.{i}.")}
        h = F.layer_norm(x, (WIDTH,), p["norm1.weight"], p["norm1.bias"], 1e-6)
        qkv = F.linear(h, p["attn.qkv.weight"], p["attn.qkv.bias"])
        q, k, v = qkv.reshape(*h.shape[:2], 3, WIDTH // 64, 64).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(h.shape)
        x = x + p["ls1.gamma"] * F.linear(h, p["attn.proj.weight"], p["attn.proj.bias"])
        h = F.layer_norm(x, (WIDTH,), p["norm2.weight"], p["norm2.bias"], 1e-6)
        h = F.linear(
            F.gelu(F.linear(h, p["mlp.fc1.weight"], p["mlp.fc1.bias"])), p["mlp.fc2.weight"], p["mlp.fc2.bias"]
        )
        x = x + p["ls2.gamma"] * h
    return F.layer_norm(x, (WIDTH,), w["norm.weight"], w["norm.bias"], 1e-6)


def main() -> None:
    pixels = images(4, (2, *SIDES, 3))
    lines = listing(shapes(), {"ls1": 5.0, "ls2": 5.0})  # every block counts
    with torch.no_grad():
        tokens = run({name: torch.from_numpy(value) for name, value in drawn(lines).items()}, pixels).numpy()
    patches = tokens[:, 1:].reshape(2, SIDES[0] // PATCH, SIDES[1] // PATCH, WIDTH)
    np.savez_compressed(HERE / "dinov2.npz", images=pixels, features=tokens[:, 0], patches=patches, weights=lines)


if __name__ == "__main__":
    main()
