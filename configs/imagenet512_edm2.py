"""EDM2 on ImageNet at 512x512 (Karras et al. 2024): UNets on 64x64x4 latents, S with 280.2 M parameters, bfloat16.

    jaxdiff train --config=imagenet512_edm2:S --config.data.options.path=FOLDER --workdir=runs/edm2_s
    jaxdiff ema --workdir=runs/edm2_s --widths=0.03,0.05,0.08,0.1,0.13 --evaluate

`:XS` (125 M), `:S` (280 M, the default), `:M` (498 M), `:L` (777 M), `:XL` (1.1 B) and `:XXL` (1.5 B) choose
the size, `:tiny` takes a few steps of a small one on the embedded digits.

FOLDER holds `*.array_record` files of latents, made once with the autoencoder of Stable Diffusion and
`data.write_array_records(path, [{"image": latent, "label": label}, ...], num_classes=1000)`: latents are float32
[64 64 4], each channel shifted and scaled to mean 0 and standard deviation 0.5 over the data.

A pod. Averages of relative widths 0.05 and 0.1 are stored every 8.4 M images, from which `jaxdiff ema` combines any
width after training; choose the width by evaluation. `--config.sample.weak=runs/edm2_xs --config.sample.guidance=2`
guides a trained network by a smaller or less trained one. Rates, durations and dropout of each size are those of the
paper's table as recalled; a test checks the schedule of XS. bfloat16 takes the place of float16. Samples are latents,
compared with the data as latents, by sliced Wasserstein distance, unless `--config.autoencoder` decodes them. Not run
here.
"""

from ml_collections import ConfigDict

from jaxdiff.arguments import argument
from jaxdiff.configs import default
from jaxdiff.models import edm2

MILLION, MEBI = 1_000_000, 2**20
BATCH = 2048
# size: learning rate, dropout, images seen in training / 2^20
RECIPES = {
    "XS": (0.0120, 0.0, 2048),
    "S": (0.0100, 0.0, 2048),
    "M": (0.0090, 0.1, 2048),
    "L": (0.0080, 0.1, 1792),
    "XL": (0.0070, 0.1, 1280),
    "XXL": (0.0065, 0.1, 896),
}
ARGUMENTS = {
    "XS": "EDM2-XS",
    "S": "EDM2-S, the default",
    "M": "EDM2-M",
    "L": "EDM2-L",
    "XL": "EDM2-XL",
    "XXL": "EDM2-XXL",
    "tiny": "a few steps of a small network on the embedded digits",
}


def get_config(arg: str = "") -> ConfigDict:
    arg = argument(arg, ARGUMENTS)
    c = default.get_config()
    c.data.source = "array_records"
    c.data.options = ConfigDict({"path": "data/imagenet512-latents"})
    c.noise.mean, c.noise.std = -0.4, 1.0
    size = arg if arg in RECIPES else "S"
    recipe(c, size, *RECIPES[size], constant_batches=70_000)
    c.eval.net, c.eval.samples = "", 10_000
    if arg == "tiny":
        tiny(c)
    c.lock()
    return c


def recipe(
    c: ConfigDict, size: str, learning_rate: float, dropout: float, mebi_images: int, constant_batches: int
) -> None:
    """The network of a size and its training, the same at all resolutions but for the noise levels."""
    c.data.batch_size = BATCH
    c.model.name = "edm2"
    c.model.fields = ConfigDict(
        {
            "resolution": 64,
            "width": edm2.SIZES[size],
            "channel_mult": (1, 2, 3, 4),
            "blocks": 3,
            "attention": (16, 8),
            "dropout": dropout,
        }
    )
    c.model.dtype = "bfloat16"
    c.diffusion.uncertainty = True
    c.optim.learning_rate, c.optim.options = learning_rate, ConfigDict({"b1": 0.9, "b2": 0.99})
    c.optim.warmup_images = 10 * MILLION
    c.optim.decay, c.optim.decay_images = "sqrt", constant_batches * BATCH
    c.ema.kind, c.ema.options = "power", ConfigDict({"sigma_rel": 0.05})
    c.ema.widths, c.ema.snapshot_every = (0.05, 0.1), 8 * MEBI // BATCH
    c.train.steps = mebi_images * MEBI // BATCH
    c.train.log_every, c.train.sample_every, c.train.save_every = 100, 8192, 8192
    c.mesh.data, c.mesh.fsdp = 1, -1
    c.sample.timestamps = 32  # Heun and a last Euler step: 63 evaluations
    c.sample.count = 16


def tiny(c: ConfigDict) -> None:
    """A few steps of a small network on the embedded digits."""
    c.data.source = "digits"
    c.data.options = ConfigDict({"image_size": 16, "channels": 3})
    c.data.batch_size = 16
    c.model.dtype = "float32"
    c.model.fields.update(resolution=16, width=16, channel_mult=(1, 2), blocks=1, attention=(8,), channels_per_head=16)
    c.optim.warmup_images, c.optim.decay_images = 0, 1000
    c.ema.snapshot_every = 2
    c.train.steps, c.train.log_every, c.train.save_every = 4, 2, 2
    c.sample.timestamps, c.sample.count = 4, 4
    c.eval.net, c.eval.samples, c.eval.reference = "", 64, 64
