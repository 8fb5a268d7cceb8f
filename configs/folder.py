"""A class-conditional UNet on your own folder of images: one sub-folder per class, or a flat folder.

    jaxdiff train --config=configs/folder.py:PATH --workdir=runs/photos

The argument is the folder. 64x64, EDM's DDPM++ network; for other sizes change data.options.image_size and
model.fields.resolution together. A GPU is advisable.
"""

from ml_collections import ConfigDict

from jaxdiff.configs import default


def get_config(arg: str = "") -> ConfigDict:
    c = default.get_config()
    tiny = arg == "tiny"
    size = 8 if tiny else 64
    if tiny:
        c.data.source = "digits"
    else:
        c.data.source = "folder"
        c.data.options = ConfigDict(
            {"path": arg or "images", "image_size": size, "crop": "center", "flip": True, "channels": 3}
        )
    c.data.batch_size = 16 if tiny else 256
    c.model.fields = ConfigDict(
        {
            "resolution": size,
            "width": 8 if tiny else 128,
            "multipliers": (1, 2) if tiny else (1, 2, 2, 2),
            "blocks": 1 if tiny else 4,
            "attention": (size // 2,) if tiny else (16,),
            "dropout": 0.05,
        }
    )
    c.cond.drop = 0.1
    c.optim.learning_rate = 2e-4
    c.optim.warmup_images = 16 if tiny else 1_000_000
    c.train.steps = 2 if tiny else 200_000
    c.train.save_every, c.train.sample_every = 5000, 5000
    c.sample.count = 4 if tiny else 64
    c.eval.net = ""
    if tiny:
        c.sample.steps, c.eval.samples = 4, 16
    c.lock()
    return c
