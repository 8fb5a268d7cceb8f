"""A class-conditional UNet on your own folder of images: one sub-folder per class, or a flat folder.

    jaxdiff train --config=folder:PATH --workdir=runs/photos

The argument is the folder. 64x64, EDM's DDPM++ network; for other sizes set data.options.image_size and
model.fields.resolution together. A GPU is recommended.
"""

from ml_collections import ConfigDict

from jaxdiff.configs import default

ARGUMENTS = {"PATH": "the folder of images"}


def get_config(arg: str = "") -> ConfigDict:
    c = default.get_config()
    c.data.source = "folder"
    c.data.options = ConfigDict(
        {"path": arg or "images", "image_size": 64, "crop": "center", "flip": True, "channels": 3}
    )
    c.data.batch_size = 256
    c.model.fields = ConfigDict(
        {
            "resolution": 64,
            "width": 128,
            "channel_mult": (1, 2, 2, 2),
            "blocks": 4,
            "attention": (16,),
            "dropout": 0.05,
        }
    )
    c.diffusion.cond_dropout = 0.1
    c.optim.learning_rate = 2e-4
    c.optim.warmup_images = 1_000_000
    c.train.steps = 200_000
    c.train.save_every, c.train.sample_every = 5000, 5000
    c.sample.count = 64
    c.eval.net = "compact"
    c.lock()
    return c
