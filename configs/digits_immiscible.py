"""Immiscible diffusion on the embedded digits (Li et al. 2024): the noise of a batch is assigned to the nearest images.

    jaxdiff train --config=digits_immiscible --workdir=runs/immiscible

The network of `--config=digits`, unconditional, as immiscible diffusion is published. The argument chooses what is
trained: none for denoising with EDM's loss, `:ddim` for a DDPM sampled with DDIM, `:ct` for consistency training from
data alone, `:cd` for the consistency distillation of the teacher at config.teacher.path; `:tiny` takes a few steps of
consistency training. `--config.noise.assignment=none` is the baseline of each. Any CPU, in minutes.
"""

from ml_collections import ConfigDict

from jaxdiff.arguments import argument
from jaxdiff.configs import digits

ARGUMENTS = {
    "ddim": "a DDPM sampled with DDIM",
    "ct": "consistency training from data alone",
    "cd": "consistency distillation of a teacher",
    "tiny": "a few steps of consistency training",
}


def get_config(arg: str = "") -> ConfigDict:
    arg = argument(arg, ARGUMENTS)
    c = digits.get_config("tiny" if arg == "tiny" else "")
    with c.unlocked():
        c.noise.assignment = "hungarian"
        c.diffusion.cond_dropout = 0.0
        c.model.fields.num_classes = 0
        if arg == "ddim":
            c.denoiser.kind, c.denoiser.prediction, c.denoiser.schedule = "ddpm", "eps", "linear"
            c.noise.sigma_sampler, c.diffusion.weight = "discrete", "eps"
            c.sample.solver, c.sample.grid, c.sample.timestamps = "euler", "discrete", 20
            c.sample.sigma_min, c.sample.sigma_max = 0.01, 158.0
        if arg in ("ct", "cd", "tiny"):
            c.method.name = "consistency"
            c.consistency.mean, c.consistency.std = -1.1, 2.0
            c.consistency.first, c.consistency.last = 10, 80
            c.optim.name, c.optim.learning_rate = "radam", 1e-3
            c.sample.solver, c.sample.options = "renoise", ConfigDict({"floor": 0.002})
            c.sample.timestamps, c.sample.sigma_min = 1, 0.8
        if arg == "cd":
            c.consistency.distil, c.teacher.path = True, "runs/digits"
            c.model.fields.num_classes = 10  # as the teacher
            c.noise.assignment = "none"
    return c
