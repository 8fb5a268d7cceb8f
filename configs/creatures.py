"""Small unconditional networks on procedural 16x16 creatures, for feature extraction: a UNet with attention, or a DiT.

    jaxdiff train --config=creatures --workdir=runs/creatures
    jaxdiff train --config=creatures:dit --workdir=runs/creatures_dit

`:dit` is the DiT, `:photos` the UNet for 32x32 photographs in an .npz file (--config.data.options.images=FILE, as
written by `python -m experiments.features.labelled`), `:tiny` a few steps of a small UNet. All are unconditional, so
that a probe of classes finds what the images alone contain. docs/features.md describes the studies they are used in.
"""

from ml_collections import ConfigDict

from jaxdiff.arguments import argument
from jaxdiff.configs import default

ARGUMENTS = {
    "dit": "the DiT",
    "photos": "the UNet for 32x32 photographs of an .npz file",
    "tiny": "a few steps of a small UNet",
}


def get_config(arg: str = "") -> ConfigDict:
    arg = argument(arg, ARGUMENTS)
    c = default.get_config()
    c.data.source = "creatures"
    c.data.options = ConfigDict({"count": 3000, "size": 16})
    c.data.batch_size = 32
    c.model.fields = ConfigDict(
        {"resolution": 16, "width": 16, "channel_mult": (1, 2, 2), "blocks": 1, "attention": (8,), "num_classes": 0}
    )
    c.optim.learning_rate = 2e-3
    c.train.steps = 1200
    if arg == "dit":
        c.model.name = "dit"
        fields = {"patch": 2, "depth": 4, "width": 48, "heads": 4, "learn_variance": False, "num_classes": 0}
        c.model.fields = ConfigDict(fields)
        c.denoiser.kind, c.noise.sigma_sampler, c.diffusion.weight = "ddpm", "discrete", "eps"
        c.optim.learning_rate = 1e-3
        c.train.steps = 2000
    if arg == "photos":
        c.data.source, c.data.options = "arrays", ConfigDict({"images": "photos32.npz"})
        c.data.batch_size = 16
        c.model.fields.update(resolution=32, channel_mult=(1, 2, 2, 2))
        c.train.steps = 1000
    c.optim.warmup_images = 100 * c.data.batch_size
    c.optim.decay, c.optim.decay_images = "cosine", c.train.steps * c.data.batch_size
    c.ema.options = ConfigDict({"images": 3200.0, "ramp": 0.05})
    c.sample.count = 16
    c.eval.net, c.eval.samples = "", 500
    if arg == "tiny":
        c.data.options.count = 64
        c.data.batch_size = 8
        c.model.fields.update(width=8, channel_mult=(1, 2))
        c.train.steps, c.train.log_every, c.train.save_every = 4, 2, 2
        c.sample.timestamps, c.sample.count, c.eval.samples = 4, 4, 16
    c.lock()
    return c
