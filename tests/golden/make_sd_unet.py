"""Makes sd_unet.npz and sdxl_unet.npz: tiny UNets in the two layouts of diffusers, their outputs and input gradients.

    python tests/golden/make_sd_unet.py

Run where torch and diffusers are installed; written with torch 2.13.0 and diffusers 0.42.1. The tests need only the
arrays. Weights are multiples of 2^-13 with few bits: exact in float16, and they compress.
"""

import zlib
from pathlib import Path

import numpy as np
import torch
from diffusers import UNet2DConditionModel

HERE = Path(__file__).parent
CROSS, PLAIN = ("CrossAttnDownBlock2D", "CrossAttnUpBlock2D"), ("DownBlock2D", "UpBlock2D")
FAINT = ("conv_in", "conv2", "conv_shortcut", "proj_in", "proj_out", "conv")
SHARED = {"sample_size": 8, "in_channels": 4, "out_channels": 4, "norm_num_groups": 4, "cross_attention_dim": 10}
SD = {
    "block_out_channels": (8, 16), "layers_per_block": 1, "attention_head_dim": 2,
    "down_block_types": (CROSS[0], PLAIN[0]), "up_block_types": (PLAIN[1], CROSS[1]),
}  # fmt: skip
FULL = {  # Stable Diffusion 1 is what diffusers builds by default
    "SD 1": {"cross_attention_dim": 768},
    "SDXL": {
        "block_out_channels": (320, 640, 1280), "attention_head_dim": (5, 10, 20), "cross_attention_dim": 2048,
        "down_block_types": (PLAIN[0], CROSS[0], CROSS[0]), "up_block_types": (CROSS[1], CROSS[1], PLAIN[1]),
        "transformer_layers_per_block": (1, 2, 10), "use_linear_projection": True,
        "addition_embed_type": "text_time", "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
    },
}  # fmt: skip
SDXL = {
    "block_out_channels": (8, 16), "layers_per_block": 1, "attention_head_dim": (2, 4),
    "down_block_types": (PLAIN[0], CROSS[0]), "up_block_types": (CROSS[1], PLAIN[1]),
    "transformer_layers_per_block": (1, 2), "use_linear_projection": True, "addition_embed_type": "text_time",
    "addition_time_embed_dim": 6, "projection_class_embeddings_input_dim": 12 + 6 * 6,
}  # fmt: skip


def build(config: dict) -> UNet2DConditionModel:
    torch.manual_seed(0)
    model = UNet2DConditionModel(**SHARED, **config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # norms and biases start constant; make every array count
            parameter.add_(0.15 * torch.randn_like(parameter))
            parameter.copy_((256 * parameter).round() / 256)
            if name.split(".")[-2] in FAINT:  # norms then see small numbers, where their epsilons tell
                parameter.div_(32)
    return model.eval()


def make(name: str, config: dict, added: dict, mask: torch.Tensor) -> None:
    """The arrays of a model, one input, its output and d(sum of output * weight)/dx, and the output under a mask."""
    model = build(config)
    x, text, weight = torch.randn(2, 4, 8, 12), torch.randn(2, 5, 10), torch.randn(2, 4, 8, 12)
    t = torch.tensor([3.0, 871.5])
    options = {"added_cond_kwargs": added, "return_dict": False} if added else {"return_dict": False}
    x.requires_grad_()
    out = model(x, t, text, **options)[0]
    (slope,) = torch.autograd.grad((out * weight).sum(), x)
    with torch.no_grad():
        masked = model(x, t, text, encoder_attention_mask=mask, **options)[0]
    arrays = {f"param/{key}": value.half() for key, value in model.state_dict().items()}
    arrays |= {"in/x": x, "in/text": text, "in/t": t, "in/mask": mask, "in/weight": weight}
    arrays |= {"out/y": out, "out/slope": slope, "out/masked": masked}
    arrays |= {f"in/{key}": value for key, value in added.items()}
    print(name, sum(p.numel() for p in model.parameters()), "parameters, output std", float(out.detach().std()))
    np.savez_compressed(HERE / f"{name}.npz", **{key: value.detach().numpy() for key, value in arrays.items()})


def describe(name: str, config: dict) -> None:
    """What the tests hold a full-size network against: parameters, arrays, a checksum of their sorted names."""
    with torch.device("meta"):
        state = UNet2DConditionModel(**config).state_dict()
    checksum = zlib.crc32("\n".join(sorted(state)).encode())
    print(name, sum(array.numel() for array in state.values()), "parameters,", len(state), "arrays, names", checksum)


if __name__ == "__main__":
    for name, config in FULL.items():
        describe(name, config)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]])
    make("sd_unet", SD, {}, mask)
    generator = torch.Generator().manual_seed(1)
    sizes = torch.tensor([[512.0, 768, 0, 64, 1024, 1024], [1000, 900, 17, 0, 896, 1152]])
    make("sdxl_unet", SDXL, {"text_embeds": torch.randn(2, 12, generator=generator), "time_ids": sizes}, mask)
