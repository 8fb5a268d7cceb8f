"""EDM2 on ImageNet at 64x64 (Karras et al. 2024): class-conditional UNets, S with 280.2 M parameters, bfloat16.

    jaxdiff train --config=imagenet64_edm2:S --workdir=runs/edm2_s
    jaxdiff ema --workdir=runs/edm2_s --widths=0.05,0.08,0.1,0.13 --evaluate --config.eval.weights=inception.safetensors

`:XS` (125 M), `:S` (280 M, the default), `:M` (498 M), `:L` (777 M), `:XL` (1.1 B) and `:XXL` (1.5 B) choose
the size, `:tiny` takes a few steps of a small one on the embedded digits. S, M, L and XL are published; XS and XXL have
the rates of 512x512 and the durations of their neighbours. The data are those of `imagenet64`; `imagenet512_edm2` says
how averages and guidance are used. A pod. Not run here.
"""

from ml_collections import ConfigDict

from jaxdiff.arguments import argument
from jaxdiff.configs import default, imagenet512_edm2

# images seen in training / 2^20; rates and dropout are those at 512x512
DURATIONS = {"XS": 1024, "S": 1024, "M": 2048, "L": 1024, "XL": 640, "XXL": 640}
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
    c.data.source = "tfds"
    c.data.options = ConfigDict({"dataset": "imagenet2012", "split": "train", "image_size": 64, "crop": "center"})
    c.noise.mean, c.noise.std = -0.8, 1.6
    size = arg if arg in DURATIONS else "S"
    rate, dropout, _ = imagenet512_edm2.RECIPES[size]
    imagenet512_edm2.recipe(c, size, rate, dropout, DURATIONS[size], constant_batches=35_000)
    c.eval.net, c.eval.samples, c.eval.reference = "inception", 50_000, 50_000
    if arg == "tiny":
        imagenet512_edm2.tiny(c)
    c.lock()
    return c
