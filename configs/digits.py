"""Class-conditional teacher on the embedded 8x8 digits: EDM loss, a UNet of 189 k parameters.

    jaxdiff train --config=digits --workdir=runs/digits

Any CPU, in minutes. The quickstart trains this teacher. `:long` trains three times as long, for comparing samplers: at
five evaluations the error of the short one hides theirs.
"""

from ml_collections import ConfigDict

from jaxdiff.arguments import argument
from jaxdiff.configs import default

ARGUMENTS = {
    "long": "three times as long",
    "tiny": "a few steps of a small network",
}


def get_config(arg: str = "") -> ConfigDict:
    arg = argument(arg, ARGUMENTS)
    c = default.get_config()
    c.data.source = "digits"
    c.data.batch_size = 64
    c.model.fields = ConfigDict(
        {"resolution": 8, "width": 16, "channel_mult": (1, 2), "blocks": 1, "attention": (4,), "style": "ddpmpp"}
    )
    c.diffusion.cond_dropout = 0.1
    c.optim.learning_rate = 2e-3
    c.optim.warmup_images = 6400
    c.optim.decay, c.optim.decay_images = "cosine", 64 * 2000
    c.ema.options = ConfigDict({"images": 6400.0, "ramp": 0.05})
    c.train.steps = 2000
    c.train.save_every = 1000
    c.eval.samples = 2000
    if arg == "tiny":
        c.data.batch_size = 16
        c.model.fields.width = 8
        c.train.steps, c.train.log_every, c.train.save_every = 4, 2, 2
        c.sample.timestamps, c.sample.count, c.eval.samples, c.eval.reference = 4, 4, 64, 64
    elif arg == "long":
        c.train.steps, c.optim.decay_images = 6000, 64 * 6000
    c.lock()
    return c
