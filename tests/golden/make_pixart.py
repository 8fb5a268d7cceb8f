"""Makes pixart.npz: a tiny PixArt transformer of diffusers with and without size embedders, and its outputs.

    python tests/golden/make_pixart.py

Run where torch and diffusers are installed; written with torch 2.13.0 and diffusers 0.42.1. The tests need only the
arrays. Weights are multiples of 2^-9 below 2: exact in float16, and they compress.
"""

import zlib
from pathlib import Path

import numpy as np
import torch
from diffusers import PixArtTransformer2DModel

HERE = Path(__file__).parent
TINY = {
    "num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2, "cross_attention_dim": 24,
    "caption_channels": 10, "sample_size": 8,
}  # fmt: skip
FULL = {"caption_channels": 4096}


def build(**config: object) -> PixArtTransformer2DModel:
    torch.manual_seed(0)
    model = PixArtTransformer2DModel(**TINY, **config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "_embedder" not in name:  # float32 sinusoids of large numbers are inexact: do not amplify them
                parameter.add_(0.1 * torch.randn_like(parameter))
            parameter.copy_((512 * parameter).round() / 512)
    return model.eval()


def make() -> None:
    """The arrays of a model with sizes; outputs with and without a mask, and of the same weights without sizes."""
    sized = build(use_additional_conditions=True, interpolation_scale=2)
    plain = build(use_additional_conditions=False)
    plain.load_state_dict({name: array for name, array in sized.state_dict().items() if "_embedder" not in name
                           or "timestep" in name})  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    x, text = torch.randn(2, 4, 8, 12, generator=generator), torch.randn(2, 5, 10, generator=generator)
    t, mask = torch.tensor([3.0, 871.5]), torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]])
    added = {"resolution": torch.tensor([[512.0, 768], [1000, 900]]), "aspect_ratio": torch.tensor([[0.667], [1.11]])}
    with torch.no_grad():
        common = {"encoder_hidden_states": text, "timestep": t, "return_dict": False}
        out = sized(x, added_cond_kwargs=added, **common)[0]
        masked = sized(x, added_cond_kwargs=added, encoder_attention_mask=mask, **common)[0]
        alone = plain(x, encoder_attention_mask=mask, **common)[0]
    arrays = {f"param/{key}": value.half() for key, value in sized.state_dict().items()}
    arrays |= {"in/x": x, "in/text": text, "in/t": t, "in/mask": mask}
    arrays |= {f"in/{key}": value for key, value in added.items()}
    arrays |= {"out/y": out, "out/masked": masked, "out/plain": alone}
    print(sum(p.numel() for p in sized.parameters()), "parameters, output std", float(out.std()))
    np.savez_compressed(HERE / "pixart.npz", **{key: value.numpy() for key, value in arrays.items()})


def describe(sizes: bool) -> None:
    """What the tests hold a full-size network against: parameters, arrays, a checksum of their sorted names."""
    with torch.device("meta"):
        state = PixArtTransformer2DModel(**FULL, use_additional_conditions=sizes).state_dict()
    checksum = zlib.crc32("\n".join(sorted(state)).encode())
    print(sum(array.numel() for array in state.values()), "parameters,", len(state), "arrays, names", checksum)


if __name__ == "__main__":
    describe(sizes=False)
    describe(sizes=True)
    make()
