"""Makes flux.npz and sd35.npz: outputs of tiny FLUX and SD3.5-medium transformers of diffusers with seeded weights.

    python tests/golden/make_flux.py

Run where torch and diffusers are installed; written with torch 2.13.0 and diffusers 0.42.1. The tests need only the
arrays. Weights are drawn by name (seeded.py); those of embedders are small, because float32 sinusoids of large numbers
are inexact.
"""

import zlib
from pathlib import Path

import numpy as np
import seeded
import torch
from diffusers import FluxTransformer2DModel, SD3Transformer2DModel

HERE = Path(__file__).parent
FACTORS = {"timestep_embedder": 0.05, "guidance_embedder": 0.05}
FLUX = {
    "in_channels": 16, "num_layers": 2, "num_single_layers": 3, "attention_head_dim": 16, "num_attention_heads": 2,
    "joint_attention_dim": 10, "pooled_projection_dim": 6, "axes_dims_rope": (4, 6, 6),
}  # fmt: skip
MEDIUM = {
    "sample_size": 8, "patch_size": 2, "in_channels": 4, "num_layers": 4, "attention_head_dim": 8,
    "num_attention_heads": 3, "joint_attention_dim": 20, "caption_projection_dim": 24, "pooled_projection_dim": 12,
    "out_channels": 4, "pos_embed_max_size": 8, "qk_norm": "rms_norm", "dual_attention_layers": (0, 1),
}  # fmt: skip


def fill(model: torch.nn.Module) -> np.ndarray:
    """Seeded weights into the model; their listing. Position tables keep their values."""
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    lines = seeded.listing(shapes, FACTORS)
    drawn = {name: torch.tensor(value) for name, value in seeded.weights(lines).items()}
    model.load_state_dict({**model.state_dict(), **drawn})
    return lines


def packed(x: torch.Tensor) -> torch.Tensor:
    """Latents [b c h w] as tokens of 2x2 patches, channel first within a token."""
    b, c, h, w = x.shape
    return x.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(b, h * w // 4, 4 * c)


def unpacked(tokens: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    b, c, h, w = shape
    return tokens.view(b, h // 2, w // 2, c, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(shape)


def flux() -> None:
    """With and without the guidance embedding, on 8x12 latents of 4 channels and five text tokens."""
    generator = torch.Generator().manual_seed(1)
    x, text = torch.randn(2, 4, 8, 12, generator=generator), torch.randn(2, 5, 10, generator=generator)
    pooled, t, guidance = torch.randn(2, 6, generator=generator), torch.tensor([0.25, 0.875]), torch.tensor([3.5, 1.5])
    ids = torch.zeros(4, 6, 3)
    ids[..., 1], ids[..., 2] = torch.arange(4)[:, None], torch.arange(6)
    common = {
        "encoder_hidden_states": text, "pooled_projections": pooled, "timestep": t, "img_ids": ids.reshape(-1, 3),
        "txt_ids": torch.zeros(5, 3), "return_dict": False,
    }  # fmt: skip
    arrays = {"in/x": x, "in/text": text, "in/pooled": pooled, "in/t": 1000 * t, "in/guidance": guidance}
    listings = {}
    for name, guided in (("dev", True), ("schnell", False)):
        model = FluxTransformer2DModel(**FLUX, guidance_embeds=guided).eval()
        listings[f"weights/{name}"] = fill(model)
        with torch.no_grad():
            out = model(packed(x), guidance=guidance if guided else None, **common)[0]
        arrays[f"out/{name}"] = unpacked(out, x.shape)
    save("flux", arrays, listings)


def sd35() -> None:
    """Two blocks with dual attention, one joint block and the last one."""
    model = SD3Transformer2DModel(**MEDIUM).eval()
    listing = fill(model)
    generator = torch.Generator().manual_seed(1)
    x, text = torch.randn(2, 4, 8, 12, generator=generator), torch.randn(2, 5, 20, generator=generator)
    pooled, t = torch.randn(2, 12, generator=generator), torch.tensor([3.0, 871.5])
    with torch.no_grad():
        out = model(x, encoder_hidden_states=text, pooled_projections=pooled, timestep=t, return_dict=False)[0]
    arrays = {"in/x": x, "in/text": text, "in/pooled": pooled, "in/t": t, "out/y": out}
    save("sd35", {**arrays, "positions": model.pos_embed.pos_embed}, {"weights": listing})


def save(name: str, arrays: dict[str, torch.Tensor], listings: dict[str, np.ndarray]) -> None:
    print(name, {key: round(float(value.std()), 3) for key, value in arrays.items() if key.startswith("out")})
    found = {key: value.numpy() for key, value in arrays.items()}
    np.savez_compressed(HERE / f"{name}.npz", **found, **listings)


def describe() -> None:
    """What the tests hold full-size networks against: parameters, arrays, a checksum of their sorted names."""
    with torch.device("meta"):
        medium = {"num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536, "in_channels": 16}
        medium |= {"out_channels": 16, "pos_embed_max_size": 384, "sample_size": 128, "qk_norm": "rms_norm"}
        networks = {
            "dev": FluxTransformer2DModel(guidance_embeds=True),
            "schnell": FluxTransformer2DModel(),
            "sd3.5-medium": SD3Transformer2DModel(**medium, dual_attention_layers=tuple(range(13))),
        }
    for name, model in networks.items():
        state, checksum = model.state_dict(), zlib.crc32("\n".join(sorted(model.state_dict())).encode())
        print(name, sum(p.numel() for p in model.parameters()), "parameters,", len(state), "arrays, names", checksum)


if __name__ == "__main__":
    flux()
    sd35()
    describe()
