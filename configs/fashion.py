"""Class-conditional teacher on Fashion-MNIST at 32x32: a UNet of 1.03 M parameters over patches of 2x2 pixels.

    python -m experiments.images.prepare fashion_mnist.npz --out=fashion32.npz
    jaxdiff train --config=fashion --workdir=runs/fashion

For CPUs: hours on two cores. The learning rate falls as 1 / sqrt(images) after the first 200,000, so that a run can be
stopped, evaluated and continued with more steps. `:tiny` is a few steps of a small network on the embedded digits.
"""

from ml_collections import ConfigDict

from jaxdiff.arguments import argument
from jaxdiff.configs import default

ARGUMENTS = {"tiny": "a few steps of a small network on the embedded digits"}


def get_config(arg: str = "") -> ConfigDict:
    arg = argument(arg, ARGUMENTS)
    c = default.get_config()
    c.data.source = "arrays"
    c.data.options = ConfigDict({"images": "fashion32.npz"})
    c.data.batch_size = 64
    c.model.fields = ConfigDict(
        {
            "resolution": 32,
            "patch": 2,
            "width": 32,
            "channel_mult": (1, 2),
            "blocks": 2,
            "attention": (8,),
            "style": "ddpmpp",
        }
    )
    c.diffusion.cond_dropout = 0.1
    c.optim.learning_rate = 2e-3
    c.optim.warmup_images = 20_000
    c.optim.decay, c.optim.decay_images = "sqrt", 200_000
    c.ema.options = ConfigDict({"images": 100_000.0, "ramp": 0.05})
    c.train.steps = 40_000
    c.train.log_every, c.train.save_every, c.train.sample_every = 100, 500, 2000
    c.eval.net, c.eval.preset, c.eval.samples, c.eval.reference = "inception", "edm", 5000, 5000
    if arg == "tiny":
        c.data.source = "digits"
        c.data.options = ConfigDict({"image_size": 16})
        c.data.batch_size = 16
        c.model.fields.update(resolution=16, width=8, blocks=1, attention=(4,))
        c.optim.warmup_images = 0
        c.train.steps, c.train.log_every, c.train.save_every, c.train.sample_every = 4, 2, 2, 0
        c.sample.timestamps, c.sample.count = 4, 4
        c.eval.preset, c.eval.net, c.eval.samples, c.eval.reference = "", "", 64, 64
    c.lock()
    return c
