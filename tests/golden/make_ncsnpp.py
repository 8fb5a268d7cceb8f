"""Makes edm_ncsnpp.npz: a tiny NCSN++ of EDM as a PyTorch program with seeded weights; run where torch is installed.

    python tests/golden/make_ncsnpp.py

Written with torch 2.13.0 from the equations (Song et al. 2021; Karras et al. 2022, Table 7), with one point that EDM's
weights depend on: sine comes before cosine in the embedding, here as in DDPM++. Only names, inputs and outputs are
stored; both sides draw the weights (seeded.py).
"""

import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from seeded import listing
from seeded import weights as drawn

HERE = Path(__file__).parent
SIDE, WIDTH, MULT, ATTENTION = 16, 16, (1, 2), (8,)
FACTORS = {"map_noise": 20.0}  # frequencies of scale 2
FILTER = torch.tensor([1.0, 3, 3, 1]) / 8


class Names(dict):
    """Shapes as they are asked for on a first pass, arrays on the second."""

    def __init__(self, arrays: dict | None = None) -> None:
        super().__init__()
        self.arrays = arrays

    def __call__(self, name: str, *shape: int) -> torch.Tensor:
        self[f"model.{name}"] = shape
        return torch.zeros(shape) if self.arrays is None else torch.from_numpy(self.arrays[f"model.{name}"])


def dense(get, name, x, outputs):
    return F.linear(x, get(f"{name}.weight", outputs, x.shape[1]), get(f"{name}.bias", outputs))


def conv(get, name, x, outputs, size=3, padding=None):
    weight = get(f"{name}.weight", outputs, x.shape[1], size, size)
    return F.conv2d(x, weight, get(f"{name}.bias", outputs), padding=size // 2 if padding is None else padding)


def norm(get, name, x):
    c = x.shape[1]
    return F.group_norm(x, min(32, c // 4), get(f"{name}.weight", c), get(f"{name}.bias", c), eps=1e-6)


def down(x, padding=1):
    kernel = torch.outer(FILTER, FILTER).expand(x.shape[1], 1, 4, 4)
    return F.conv2d(x, kernel, stride=2, padding=padding, groups=x.shape[1])


def up(x):
    kernel = 4 * torch.outer(FILTER, FILTER).expand(x.shape[1], 1, 4, 4)
    return F.conv_transpose2d(x, kernel, stride=2, padding=1, groups=x.shape[1])


def block(get, name, x, e, outputs, resample=None, attention=False):
    change = resample or (lambda y: y)
    h = conv(get, f"{name}.conv0", change(F.silu(norm(get, f"{name}.norm0", x))), outputs)
    h = h + dense(get, f"{name}.affine", e, outputs)[:, :, None, None]
    h = conv(get, f"{name}.conv1", F.silu(norm(get, f"{name}.norm1", h)), outputs)
    x = change(x)
    if resample or x.shape[1] != outputs:
        x = conv(get, f"{name}.skip", x, outputs, 1)
    x = (x + h) * math.sqrt(0.5)
    if not attention:
        return x
    qkv = conv(get, f"{name}.qkv", norm(get, f"{name}.norm2", x), 3 * outputs, 1).flatten(2)
    q, k, v = qkv[:, 0::3], qkv[:, 1::3], qkv[:, 2::3]  # role is the fastest index of the output channels
    weight = (q.transpose(1, 2) @ k / math.sqrt(outputs)).softmax(-1)
    found = (v @ weight.transpose(1, 2)).reshape(x.shape)
    return (x + conv(get, f"{name}.proj", found, outputs, 1)) * math.sqrt(0.5)


def network(get, x, noise):
    angles = noise[:, None] * 2 * math.pi * get("map_noise.freqs", WIDTH)
    e = torch.cat([angles.sin(), angles.cos()], 1)
    e = F.silu(dense(get, "map_layer1", F.silu(dense(get, "map_layer0", e, 4 * WIDTH)), 4 * WIDTH))
    image, skips = x, []
    for level, multiplier in enumerate(MULT):
        side = SIDE >> level
        name, outputs = f"enc.{side}x{side}", WIDTH * multiplier
        if level == 0:
            x = conv(get, f"{name}_conv", x, WIDTH)
        else:
            x = block(get, f"{name}_down", x, e, x.shape[1], down)
            image = down(conv(get, f"{name}_aux_residual", image, x.shape[1], padding=2), padding=0)
            x = image = (x + image) * math.sqrt(0.5)
        skips.append(x)
        x = block(get, f"{name}_block0", x, e, outputs, attention=side in ATTENTION)
        skips.append(x)
    for level, multiplier in reversed(list(enumerate(MULT))):
        side = SIDE >> level
        name, outputs = f"dec.{side}x{side}", WIDTH * multiplier
        if level == len(MULT) - 1:
            x = block(get, f"{name}_in0", x, e, x.shape[1], attention=True)
            x = block(get, f"{name}_in1", x, e, x.shape[1])
        else:
            x = block(get, f"{name}_up", x, e, x.shape[1], up)
        for i in range(2):
            x = torch.cat([x, skips.pop()], 1)
            x = block(get, f"{name}_block{i}", x, e, outputs, attention=side in ATTENTION and i == 1)
    name = f"dec.{SIDE}x{SIDE}_aux"
    return conv(get, f"{name}_conv", F.silu(norm(get, f"{name}_norm", x)), 3)


def denoise(get, x, sigma, data=0.5):
    s = sigma[:, None, None, None]
    total = s**2 + data**2
    out = network(get, x / total.sqrt(), sigma.log() / 4)
    return data**2 / total * x + s * data / total.sqrt() * out


def main() -> None:
    rng = np.random.Generator(np.random.PCG64(3))
    sigma = np.array([0.03, 0.4, 2.5, 40], np.float32)
    x = rng.standard_normal((4, 3, SIDE, SIDE), np.float32) * np.sqrt(sigma**2 + 0.25)[:, None, None, None]
    inputs = torch.from_numpy(x), torch.from_numpy(sigma)
    with torch.no_grad():
        names = Names()
        denoise(names, *inputs)
        lines = listing(dict(names), FACTORS)
        out = denoise(Names(drawn(lines)), *inputs)
    np.savez_compressed(
        HERE / "edm_ncsnpp.npz",
        **{"edm_ncsnpp_tiny/weights": lines, "edm_ncsnpp_tiny/in/x": x, "edm_ncsnpp_tiny/in/sigma": sigma},
        **{"edm_ncsnpp_tiny/out/denoised": out.numpy()},
    )


if __name__ == "__main__":
    main()
