"""PyTorch counterparts of `models.UNet` (DDPM++) and `models.DiT`, for benchmarks alone: same layers, same parameters.

Submodules carry the names of the Flax modules, so `load(network, params)` copies a Flax tree; the benchmarks check that
both networks return the same values before they are timed. Images are NCHW here, as PyTorch users have them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

HALF = math.sqrt(0.5)


def load(network: nn.Module, params: Mapping[str, Any]) -> None:
    """Copy the parameters of the Flax network, by name."""
    state = {}
    for path, value in _flat(params):
        name = path.replace("blocks_", "blocks.")
        array = np.asarray(value)
        leaf = name.rsplit(".", 1)[-1]
        if leaf == "kernel":
            if ".qkv." in f".{name}" or ".q." in f".{name}" or ".kv." in f".{name}":
                array = array.reshape(array.shape[0], -1).T
            elif array.ndim == 4:
                array = array.transpose(3, 2, 0, 1)
            else:
                array = array.reshape(-1, array.shape[-1]).T
        if leaf == "bias":
            array = array.reshape(-1)
        renamed = {"kernel": "weight", "scale": "weight", "embedding": "weight"}.get(leaf, leaf)
        state[name[: len(name) - len(leaf)] + renamed] = torch.from_numpy(np.ascontiguousarray(array))
    network.load_state_dict(state, strict=True)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Any:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(min(32, channels // 4), channels, eps=1e-6)


class Block(nn.Module):
    """A residual block of DDPM++."""

    def __init__(
        self, inputs: int, features: int, width: int, resample: str = "", attention: bool = False, dropout: float = 0.0
    ):
        super().__init__()
        self.resample, self.dropout = resample, dropout
        self.norm0, self.conv0 = _norm(inputs), nn.Conv2d(inputs, features, 3, padding=1)
        self.affine = nn.Linear(4 * width, features)
        self.norm1, self.conv1 = _norm(features), nn.Conv2d(features, features, 3, padding=1)
        self.skip = nn.Conv2d(inputs, features, 1) if inputs != features or resample else None
        if attention:
            self.norm2 = _norm(features)
            self.qkv, self.out = nn.Linear(features, 3 * features), nn.Linear(features, features)
        self.attention = attention

    def _resample(self, x: torch.Tensor) -> torch.Tensor:
        if self.resample == "up":
            return F.interpolate(x, scale_factor=2, mode="nearest")
        return F.avg_pool2d(x, 2) if self.resample == "down" else x

    def forward(self, x: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
        h = self.conv0(self._resample(F.silu(self.norm0(x))))
        h = F.silu(self.norm1(h + self.affine(e)[:, :, None, None]))
        h = self.conv1(F.dropout(h, self.dropout, self.training))
        x = self._resample(x)
        x = (h + (x if self.skip is None else self.skip(x))) * HALF
        if self.attention:
            tokens = self.norm2(x).flatten(2).transpose(1, 2)
            q, k, v = self.qkv(tokens).chunk(3, dim=-1)
            made = self.out(F.scaled_dot_product_attention(q, k, v)).transpose(1, 2)
            x = (x + made.reshape(x.shape)) * HALF
        return x


class UNet(nn.Module):
    """DDPM++ with the fields of `models.UNet`."""

    def __init__(
        self, resolution: int, channels: int, width: int, channel_mult: tuple[int, ...], blocks: int,
        attention: tuple[int, ...], num_classes: int = 0, dropout: float = 0.0,
    ):  # fmt: skip
        super().__init__()
        self.width, self.num_classes = width, num_classes
        if num_classes:
            self.map_label = nn.Linear(num_classes, width)
        self.map_layer0, self.map_layer1 = nn.Linear(width, 4 * width), nn.Linear(4 * width, 4 * width)
        self.encoder: list[str] = []
        self.decoder: list[str] = []
        features, skips = width, []

        def block(name: str, inputs: int, features: int, **kwargs: Any) -> None:
            setattr(self, name, Block(inputs, features, width, dropout=dropout, **kwargs))

        for level, multiplier in enumerate(channel_mult):
            side = resolution >> level
            name = f"enc_{side}x{side}_" + ("conv" if level == 0 else "down")
            if level == 0:
                setattr(self, name, nn.Conv2d(channels, width, 3, padding=1))
            else:
                block(name, features, features, resample="down")
            self.encoder.append(name)
            skips.append(features)
            for i in range(blocks):
                name = f"enc_{side}x{side}_block{i}"
                block(name, features, width * multiplier, attention=side in attention)
                features = width * multiplier
                self.encoder.append(name)
                skips.append(features)
        for level in reversed(range(len(channel_mult))):
            side = resolution >> level
            if level == len(channel_mult) - 1:
                block(f"dec_{side}x{side}_in0", features, features, attention=True)
                block(f"dec_{side}x{side}_in1", features, features)
                self.decoder += [f"dec_{side}x{side}_in0", f"dec_{side}x{side}_in1"]
            else:
                block(f"dec_{side}x{side}_up", features, features, resample="up")
                self.decoder.append(f"dec_{side}x{side}_up")
            for i in range(blocks + 1):
                name = f"dec_{side}x{side}_block{i}"
                attend = side in attention and i == blocks
                block(name, features + skips.pop(), width * channel_mult[level], attention=attend)
                features = width * channel_mult[level]
                self.decoder.append(name)
        self.out_norm, self.out_conv = _norm(features), nn.Conv2d(features, channels, 3, padding=1)

    def forward(self, x: torch.Tensor, noise_label: torch.Tensor, label: torch.Tensor | None = None) -> torch.Tensor:
        half = self.width // 2
        frequencies = 10000.0 ** (-torch.arange(half) / (half - 1))
        angles = noise_label[:, None] * frequencies
        e = torch.cat([torch.sin(angles), torch.cos(angles)], dim=-1)
        if label is not None:
            e = e + self.map_label(F.one_hot(label, self.num_classes).float() * math.sqrt(self.num_classes))
        e = F.silu(self.map_layer1(F.silu(self.map_layer0(e))))
        skips = []
        for name in self.encoder:
            layer = getattr(self, name)
            x = layer(x) if name.endswith("conv") else layer(x, e)
            skips.append(x)
        for name in self.decoder:
            if "block" in name:
                x = torch.cat([x, skips.pop()], dim=1)
            x = getattr(self, name)(x, e)
        return self.out_conv(F.silu(self.out_norm(x)))


class DiTBlock(nn.Module):
    """Self-attention and feed-forward layer, modulated by c."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.modulation = nn.ModuleDict({"dense": nn.Linear(width, 6 * width)})
        self.attention = nn.ModuleDict({"qkv": nn.Linear(width, 3 * width), "out": nn.Linear(width, width)})
        self.mlp = nn.ModuleDict({"in": nn.Linear(width, 4 * width), "out": nn.Linear(4 * width, width)})

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.modulation["dense"](F.silu(c)).chunk(6, dim=-1)
        b, n, d = x.shape
        qkv = self.attention["qkv"](_modulate(x, shift_a, scale_a)).reshape(b, n, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d)
        x = x + gate_a[:, None] * self.attention["out"](h)
        h = F.gelu(self.mlp["in"](_modulate(x, shift_m, scale_m)), approximate="tanh")
        return x + gate_m[:, None] * self.mlp["out"](h)


def _modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale[:, None]) + shift[:, None]


class DiT(nn.Module):
    """DiT with adaLN-zero; positions are given, as they are a constant."""

    def __init__(
        self, channels: int, patch: int, depth: int, width: int, heads: int, num_classes: int, positions: np.ndarray
    ):
        super().__init__()
        self.patch, self.channels = patch, channels
        self.time = nn.ModuleDict({"in": nn.Linear(256, width), "out": nn.Linear(width, width)})
        self.label = nn.Embedding(num_classes + 1, width)
        self.patches = nn.Linear(patch**2 * channels, width)
        self.blocks = nn.ModuleList(DiTBlock(width, heads) for _ in range(depth))
        modulation = nn.ModuleDict({"dense": nn.Linear(width, 2 * width)})
        self.final = nn.ModuleDict({"modulation": modulation, "out": nn.Linear(width, patch**2 * channels)})
        self.register_buffer("positions", torch.from_numpy(positions), persistent=False)

    def forward(self, x: torch.Tensor, noise_label: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        b, channels, height, width = x.shape
        p = self.patch
        tokens = x.reshape(b, channels, height // p, p, width // p, p).permute(0, 2, 4, 3, 5, 1)
        angles = noise_label[:, None] * 10000.0 ** (-torch.arange(128) / 128)
        e = torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1)
        c = self.time["out"](F.silu(self.time["in"](e))) + self.label(label)
        h = self.patches(tokens.reshape(b, -1, p * p * channels)) + self.positions
        for block in self.blocks:
            h = block(h, c)
        shift, scale = self.final["modulation"]["dense"](F.silu(c)).chunk(2, dim=-1)
        out = self.final["out"](_modulate(h, shift, scale)).reshape(b, height // p, width // p, p, p, channels)
        return out.permute(0, 5, 1, 3, 2, 4).reshape(x.shape)
