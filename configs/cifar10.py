"""EDM's DDPM++ UNet on CIFAR-10 (Karras et al. 2022): 32x32, 55.7 M parameters, unconditional, augmented.

    jaxdiff train --config=cifar10 --workdir=runs/cifar10
    jaxdiff evaluate --workdir=runs/cifar10 --config.eval.weights=inception.safetensors

`:cond` trains the class-conditional network, `:tiny` a few steps of a small one on the embedded digits. The data are
TensorFlow Datasets' `cifar10`, prepared as array records; `--config.data.options.dataset=FOLDER` names another folder.

GPUs or TPUs. The published training takes about 200 A100-hours (Zhou et al. 2024, Figure 1). Each transformation of
EDM's augmentation (jaxdiff/data/augment.py) is applied with probability 0.12; the network is conditioned on its
parameters, so that it does not show in samples. The host augments: about 1 ms per image on two cores. The released
network, trained like this, scores FID 2.91 with 50 Euler steps (Zhou et al. 2024, Table 2). Not run here.
"""

from ml_collections import ConfigDict

from jaxdiff.arguments import argument
from jaxdiff.configs import default

MILLION = 1_000_000

ARGUMENTS = {
    "cond": "the class-conditional network",
    "tiny": "a few steps of a small network on the embedded digits",
}


def get_config(arg: str = "") -> ConfigDict:
    arg = argument(arg, ARGUMENTS)
    c = default.get_config()
    c.data.source = "tfds"
    c.data.options = ConfigDict({"dataset": "cifar10", "split": "train", "augment": 0.12})
    c.data.batch_size = 512
    c.model.fields = ConfigDict(
        {
            "resolution": 32,
            "width": 128,
            "channel_mult": (2, 2, 2),
            "blocks": 4,
            "attention": (16,),
            "dropout": 0.13,
            "style": "ddpmpp",
            "num_classes": 10 if arg == "cond" else 0,
            "augment_dim": 9,
        }
    )
    c.optim.learning_rate = 1e-3
    c.optim.warmup_images = 10 * MILLION
    c.ema.options = ConfigDict({"images": 0.5 * MILLION, "ramp": 0.05})
    c.train.steps = 200 * MILLION // 512
    c.train.log_every, c.train.sample_every, c.train.save_every = 100, 10_000, 10_000
    c.sample.timestamps = 18  # Heun and a last Euler step: 35 evaluations
    c.eval.preset, c.eval.net, c.eval.samples = "edm", "inception", 50_000
    if arg == "tiny":
        c.data.source = "digits"
        c.data.options = ConfigDict({"image_size": 16, "channels": 3, "augment": 0.12})
        c.data.batch_size = 16
        c.model.fields.update(resolution=16, width=8, channel_mult=(1, 2), blocks=1, attention=(8,))
        c.model.fields.dropout = 0.0  # halves compilation time
        c.optim.warmup_images = 0
        c.train.steps, c.train.log_every, c.train.save_every = 4, 2, 2
        c.sample.timestamps, c.sample.count = 4, 4
        c.eval.preset, c.eval.net, c.eval.samples, c.eval.reference = "", "", 64, 64
    c.lock()
    return c


def without_augmentation(c: ConfigDict) -> None:
    """Images are mirrored only, and the network is not conditioned on it."""
    del c.data.options.augment
    c.data.options.flip = True
    c.model.fields.augment_dim = 0
