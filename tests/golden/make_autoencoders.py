"""Makes sd_vae.npz, sd3_vae.npz and taesd.npz: tiny autoencoders of diffusers, what they encode and decode.

    python tests/golden/make_autoencoders.py

Run where torch and diffusers are installed; written with torch 2.13.0 and diffusers 0.42.1. The tests need only the
arrays. Weights are drawn by their names (seeded.py) where they are needed; the files hold the names.
"""

import zlib
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL, AutoencoderTiny
from seeded import listing, weights

HERE = Path(__file__).parent
FAINT = dict.fromkeys(("conv_in", "conv2", "conv_shortcut", "to_out", "conv"), 2**-6)


def blocks(*widths: int) -> dict:
    names = {"down_block_types": "DownEncoderBlock2D", "up_block_types": "UpDecoderBlock2D"}
    return {"block_out_channels": widths, **{key: (name,) * len(widths) for key, name in names.items()}}


SD3 = {"latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False}
TINY = {"layers_per_block": 1, "norm_num_groups": 4, **blocks(8, 16)}
FULL = {"layers_per_block": 2, **blocks(128, 256, 512, 512)}


def fill(model: torch.nn.Module, factors: dict[str, float]) -> np.ndarray:
    """Gives the model its drawn weights; returns their listing."""
    lines = listing({name: tuple(array.shape) for name, array in model.named_parameters()}, factors)
    drawn = {name: torch.from_numpy(array) for name, array in weights(lines).items()}
    model.load_state_dict(drawn, strict=False)  # arrays under two names are listed once
    model.eval()
    return lines


def save(name: str, **arrays: torch.Tensor | np.ndarray) -> None:
    print(name, {key: round(float(value.std()), 3) for key, value in arrays.items() if isinstance(value, torch.Tensor)})
    np.savez_compressed(HERE / f"{name}.npz", **{key.replace("__", "/"): np.asarray(v) for key, v in arrays.items()})


@torch.no_grad()
def make_kl(name: str, scale: float, shift: float, config: dict) -> None:
    torch.manual_seed(0)
    model = AutoencoderKL(**config)
    lines = fill(model, FAINT)
    x, z = torch.rand(2, 3, 8, 12) * 2 - 1, torch.randn(2, config.get("latent_channels", 4), 4, 6)
    posterior = model.encode(x).latent_dist
    save(
        name, lines=lines, in__x=x, in__z=z,
        out__mean=(posterior.mode() - shift) * scale,
        out__std=posterior.std * scale,
        out__image=model.decode(z / scale + shift).sample,
    )  # fmt: skip


@torch.no_grad()
def make_tiny() -> None:
    torch.manual_seed(0)
    widths = {"encoder_block_out_channels": (8, 8, 8), "decoder_block_out_channels": (8, 8, 8)}
    model = AutoencoderTiny(num_encoder_blocks=(1, 2, 1), num_decoder_blocks=(1, 2, 1), latent_channels=6, **widths)
    lines = fill(model, {"4": 0.5})
    x, z = torch.rand(2, 3, 8, 12) * 2 - 1, 3 * torch.randn(2, 6, 2, 3)
    save("taesd", lines=lines, in__x=x, in__z=z, out__latent=model.encode(x).latents, out__image=model.decode(z).sample)


def describe(name: str, model: type, config: dict) -> None:
    """What the tests hold a full-size network against: parameters, arrays, a checksum of their sorted names."""
    with torch.device("meta"):
        arrays = dict(model(**config).named_parameters())
    checksum = zlib.crc32("\n".join(sorted(arrays)).encode())
    print(name, sum(array.numel() for array in arrays.values()), "parameters,", len(arrays), "arrays, names", checksum)


if __name__ == "__main__":
    describe("SD", AutoencoderKL, FULL)
    describe("SD3", AutoencoderKL, {**FULL, **SD3})
    describe("TAESD", AutoencoderTiny, {})
    describe("TAESD3", AutoencoderTiny, {"latent_channels": 16})
    make_kl("sd_vae", 0.18215, 0.0, TINY)
    make_kl("sd3_vae", 1.5305, 0.0609, {**TINY, **SD3})
    make_tiny()
