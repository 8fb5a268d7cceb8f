"""Immiscible DDPM training on CIFAR-10, sampled with DDIM (Li et al. 2024): linear schedule, eps-prediction, batch 256.

    jaxdiff train --config=configs/cifar10_ddim_immiscible.py --workdir=runs/cifar10_ddim
    jaxdiff evaluate --workdir=runs/cifar10_ddim --nfe=20 --config.eval.weights=inception.safetensors

`:miscible` is the baseline, `:tiny` takes a few steps of a small network on the embedded digits. GPUs or TPUs. The
published code base has 128 channels times (1, 2, 2, 2), two blocks, attention at 16x16 and dropout 0.1; so has this
network, in EDM's layout of it. Evaluate at 1000, 500, 100, 50 and 20 steps: the gain is said to grow as they shrink.
"""

from ml_collections import ConfigDict

from jaxdiff.configs import cifar10


def get_config(arg: str = "") -> ConfigDict:
    if arg not in ("", "miscible", "tiny"):
        raise ValueError(f"cifar10_ddim_immiscible takes the argument 'miscible', 'tiny' or none, got {arg!r}")
    c = cifar10.get_config("tiny" if arg == "tiny" else "")
    with c.unlocked():
        c.noise.assignment = "none" if arg == "miscible" else "hungarian"
        c.denoiser.kind, c.denoiser.prediction, c.denoiser.schedule = "ddpm", "eps", "linear"
        c.noise.levels, c.noise.weight = "discrete", "eps"
        c.sample.solver, c.sample.grid = "euler", "discrete"
        c.sample.sigma_min, c.sample.sigma_max = 0.01, 158.0  # the whole schedule
        if arg == "tiny":
            return c
        c.model.fields.update(multipliers=(1, 2, 2, 2), blocks=2, dropout=0.1)
        c.data.batch_size = 256
        c.optim.learning_rate, c.optim.clip = 2e-4, 1.0
        c.optim.warmup_images = 5_000 * 256
        c.ema.kind, c.ema.options = "constant", ConfigDict({"decay": 0.9999})
        c.sample.steps = 50
        c.train.steps = 163_800  # the last of Table 5
    return c
