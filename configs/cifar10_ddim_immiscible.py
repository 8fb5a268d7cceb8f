"""Immiscible DDPM training on CIFAR-10, sampled with DDIM (Li et al. 2024): linear schedule, eps-prediction, batch 256.

    jaxdiff train --config=cifar10_ddim_immiscible --workdir=runs/cifar10_ddim
    jaxdiff evaluate --workdir=runs/cifar10_ddim --nfe=20 --config.eval.weights=inception.safetensors

`:miscible` is the baseline, `:tiny` takes a few steps of a small network on the embedded digits. GPUs or TPUs. As in
the published code base, the network has 128 channels times (1, 2, 2, 2), two blocks, attention at 16x16 and dropout
0.1, here in EDM's layout. Evaluate at 1000, 500, 100, 50 and 20 steps: the paper reports a gain that grows as they
shrink.
"""

from ml_collections import ConfigDict

from jaxdiff.arguments import argument
from jaxdiff.configs import cifar10

ARGUMENTS = {
    "miscible": "the baseline, noise not assigned",
    "tiny": "a few steps of a small network on the embedded digits",
}


def get_config(arg: str = "") -> ConfigDict:
    arg = argument(arg, ARGUMENTS)
    c = cifar10.get_config("tiny" if arg == "tiny" else "")
    with c.unlocked():
        cifar10.without_augmentation(c)
        c.noise.assignment = "none" if arg == "miscible" else "hungarian"
        c.denoiser.kind, c.denoiser.prediction, c.denoiser.schedule = "ddpm", "eps", "linear"
        c.noise.sigma_sampler, c.diffusion.weight = "discrete", "eps"
        c.sample.solver, c.sample.grid = "euler", "discrete"
        c.sample.sigma_min, c.sample.sigma_max = 0.01, 158.0  # the whole schedule
        if arg == "tiny":
            return c
        c.model.fields.update(channel_mult=(1, 2, 2, 2), blocks=2, dropout=0.1)
        c.data.batch_size = 256
        c.optim.learning_rate, c.optim.clip = 2e-4, 1.0
        c.optim.warmup_images = 5_000 * 256
        c.ema.kind, c.ema.options = "constant", ConfigDict({"decay": 0.9999})
        c.sample.timestamps = 50
        c.train.steps = 163_800  # the last row of Table 5
    return c
