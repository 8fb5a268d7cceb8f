"""Makes the golden arrays of this folder from public implementations; run where torch and diffusers are installed.

    python tests/golden/make.py

Written with torch 2.13.0 and diffusers 0.42.1. The tests need only the arrays.
"""

from pathlib import Path

import numpy as np
import torch
from diffusers import SD3Transformer2DModel, UniPCMultistepScheduler

HERE = Path(__file__).parent


def sd3(name: str, qk_norm: str | None, side: int) -> None:
    """A tiny SD3 transformer with random weights: its arrays, one input, its output."""
    torch.manual_seed(0)
    model = SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=3, attention_head_dim=8, num_attention_heads=3,
        joint_attention_dim=20, caption_projection_dim=24, pooled_projection_dim=12, out_channels=4,
        pos_embed_max_size=side, qk_norm=qk_norm,
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases start constant; make every array count
            parameter.add_(0.1 * torch.randn_like(parameter))
    x, text, pooled = torch.randn(2, 4, 8, 12), torch.randn(2, 5, 20), torch.randn(2, 12)
    t = torch.tensor([3.0, 871.5])
    with torch.no_grad():
        out = model(x, encoder_hidden_states=text, pooled_projections=pooled, timestep=t, return_dict=False)[0]
    arrays = {f"param/{key}": value.numpy() for key, value in model.state_dict().items()}
    inputs = {"in/x": x, "in/text": text, "in/pooled": pooled, "in/t": t, "out/y": out}
    np.savez_compressed(HERE / f"{name}.npz", **arrays, **{key: value.numpy() for key, value in inputs.items()})


def unipc() -> None:
    """UniPC of order 2 on a Gaussian mixture, every state, in x = x0 + sigma eps."""
    rng = np.random.default_rng(0)
    means, stds, weights = rng.uniform(-0.6, 0.6, (4, 6)), rng.uniform(0.15, 0.25, 4), rng.uniform(0.1, 1, 4)
    sigmas = (80 ** (1 / 7) + np.arange(9) / 8 * (0.006 ** (1 / 7) - 80 ** (1 / 7))) ** 7
    scheduler = UniPCMultistepScheduler(solver_order=2, prediction_type="sample", predict_x0=True, solver_type="bh2")
    scheduler.set_timesteps(8)
    scheduler.sigmas, scheduler.timesteps = torch.tensor(sigmas), torch.arange(8, 0, -1)
    x = rng.standard_normal((3, 6)) * sigmas[0]
    states = [x]
    for i, t in enumerate(scheduler.timesteps):
        var = stds**2 + sigmas[i] ** 2
        logits = np.log(weights) - 0.5 * (((x[:, None] - means) ** 2).sum(-1) / var + 6 * np.log(var))
        share = np.exp(logits - logits.max(1, keepdims=True))
        share /= share.sum(1, keepdims=True)
        denoised = (share[..., None] * (means + (x[:, None] - means) * (stds**2 / var)[:, None])).sum(1)
        scaled = torch.tensor(x / np.sqrt(1 + sigmas[i] ** 2))
        x = scheduler.step(torch.tensor(denoised), t, scaled).prev_sample.numpy() * np.sqrt(1 + sigmas[i + 1] ** 2)
        states.append(x)
    np.savez(HERE / "unipc.npz", means=means, stds=stds, weights=weights, sigmas=sigmas, states=np.stack(states))


if __name__ == "__main__":
    sd3("sd3", None, side=8)
    sd3("sd3_qk_norm", "rms_norm", side=8)
    unipc()
