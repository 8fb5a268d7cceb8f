"""Immiscible fine-tuning on latents of ImageNet at 256x256 (Li et al. 2024): a public DiT-XL/2 and assigned noise.

    jaxdiff train --config=imagenet256_immiscible --config.train.init_from=FILE --workdir=runs/immiscible

FILE holds the public weights as safetensors or npz. Data as for `--config=imagenet256_dit`; `:miscible` is the
baseline, `:tiny` takes a few steps of a small network. Rate, steps and batch are those published for Stable Diffusion
1.4 with class names as prompts, where 5,000 steps gave FID 10.28 instead of 11.45; this network is conditioned on the
class itself. The noise of the batch of 512 is assigned over all devices.
`--config.noise.assignment_options.within_class=True` keeps each class's noise Gaussian. GPUs or TPUs.
"""

from ml_collections import ConfigDict

from jaxdiff.arguments import argument
from jaxdiff.configs import imagenet256_dit

ARGUMENTS = {
    "miscible": "the baseline, noise not assigned",
    "tiny": "a few steps of a small network on the embedded digits",
}


def get_config(arg: str = "") -> ConfigDict:
    arg = argument(arg, ARGUMENTS)
    c = imagenet256_dit.get_config("tiny" if arg == "tiny" else "XL")
    with c.unlocked():
        c.noise.assignment = "none" if arg == "miscible" else "hungarian"
        c.noise.assignment_options = ConfigDict({"within_class": False})
        if arg == "tiny":
            return c
        c.train.init_from, c.train.init_kind = "DiT-XL-2-256x256.safetensors", "dit"
        c.data.batch_size = 512
        c.diffusion.cond_dropout = 0.0
        c.optim.learning_rate, c.optim.clip = 1e-5, 1.0
        c.optim.options = ConfigDict({"b1": 0.9, "b2": 0.999, "weight_decay": 1e-2})
        c.train.steps = 5_000
        c.train.sample_every, c.train.save_every = 1_000, 1_000
    return c
