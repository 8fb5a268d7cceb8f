"""EDM's ADM UNet on ImageNet at 64x64 (Karras et al. 2022): class-conditional, 295.9 M parameters, bfloat16.

    jaxdiff train --config=imagenet64 --workdir=runs/imagenet64
    jaxdiff evaluate --workdir=runs/imagenet64 --config.eval.weights=inception.safetensors

`:tiny` trains a few steps of a small one on the embedded digits. The data are TensorFlow Datasets' `imagenet2012`,
prepared as array records, resized and cropped as they are read; for many epochs it pays to store the 64x64
windows once with `data.write_array_records` and to read those with the source `array_records`.

A pod: parameters, average and both moments take 4.7 GB on each device, plus activations. Raise
`--config.optim.accum_steps` when the batch does not fit, `--config.mesh.fsdp` when the parameters do not.

The released network scores FID 4.09 with 50 Euler steps (Zhou et al. 2024, Table 2). It was trained in float16 with
scaled losses; bfloat16 needs no scaling.
"""

from ml_collections import ConfigDict

from jaxdiff.arguments import argument
from jaxdiff.configs import default

MILLION = 1_000_000

ARGUMENTS = {
    "tiny": "a few steps of a small network on the embedded digits",
}


def get_config(arg: str = "") -> ConfigDict:
    arg = argument(arg, ARGUMENTS)
    c = default.get_config()
    c.data.source = "tfds"
    c.data.options = ConfigDict({"dataset": "imagenet2012", "split": "train", "image_size": 64, "crop": "center"})
    c.data.batch_size = 4096
    c.model.fields = ConfigDict(
        {
            "resolution": 64,
            "width": 192,
            "channel_mult": (1, 2, 3, 4),
            "blocks": 3,
            "attention": (32, 16, 8),
            "dropout": 0.1,
            "style": "adm",
        }
    )
    c.model.dtype = "bfloat16"
    c.optim.learning_rate = 1e-4
    c.optim.warmup_images = 10 * MILLION
    c.ema.options = ConfigDict({"images": 50.0 * MILLION, "ramp": 0.05})
    c.train.steps = 2500 * MILLION // 4096
    c.train.log_every, c.train.sample_every, c.train.save_every = 100, 5000, 5000
    c.sample.timestamps = 40  # Heun and a last Euler step: 79 evaluations
    c.eval.preset, c.eval.net, c.eval.samples = "edm", "inception", 50_000
    c.eval.reference = 50_000
    if arg == "tiny":
        c.data.source = "digits"
        c.data.options = ConfigDict({"image_size": 16, "crop": "center", "channels": 3})
        c.data.batch_size = 16
        c.model.fields.update(resolution=16, width=16, channel_mult=(1, 4), blocks=1, attention=(8,))
        c.model.fields.dropout = 0.0  # halves compilation time
        c.optim.warmup_images = 0
        c.train.steps, c.train.log_every, c.train.save_every = 4, 2, 2
        c.sample.timestamps, c.sample.count = 4, 4
        c.eval.preset, c.eval.net, c.eval.samples, c.eval.reference = "", "", 64, 64
    c.lock()
    return c
