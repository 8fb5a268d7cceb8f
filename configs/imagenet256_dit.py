"""DiT on ImageNet at 256x256 (Peebles & Xie 2023): a transformer on 32x32x4 latents, XL/2 with 674.8 M parameters.

    jaxdiff train --config=imagenet256_dit --config.data.options.path=FOLDER --workdir=runs/dit

`:S`, `:B`, `:L` and `:XL` choose the size, `:tiny` takes a few steps of a small one on the embedded digits.

FOLDER holds `*.array_record` files of latents, made once with the autoencoder of Stable Diffusion and
`data.write_array_records(path, [{"image": latent, "label": label}, ...], num_classes=1000)`: latents are float32
[32 32 4], already multiplied by 0.18215. Store those of every image and of its mirror image, 42 GB in all.

GPUs or TPUs: parameters, average and both moments of XL take 10.8 GB, split over all devices. Samples are latents;
they are compared with the data as latents, by sliced Wasserstein distance. The published XL/2, guided and decoded,
scores FID 2.27. DiT also learns variances, by a second loss that is not implemented: those outputs stay 0 and
are not used.
"""

from ml_collections import ConfigDict

from jaxdiff.arguments import argument
from jaxdiff.configs import default
from jaxdiff.models import dit

ARGUMENTS = {
    "S": "DiT-S/2",
    "B": "DiT-B/2",
    "L": "DiT-L/2",
    "XL": "DiT-XL/2, the default",
    "tiny": "a few steps of a small network on the embedded digits",
}


def get_config(arg: str = "") -> ConfigDict:
    arg = argument(arg, ARGUMENTS)
    c = default.get_config()
    c.data.source = "array_records"
    c.data.options = ConfigDict({"path": "data/imagenet256-latents"})
    c.data.batch_size = 256
    c.model.name = "dit"
    c.model.fields = ConfigDict({**dit.SIZES.get(arg, dit.SIZES["XL"]), "patch": 2, "scan": True})
    c.model.dtype, c.model.remat = "bfloat16", "full"
    c.denoiser.kind, c.denoiser.prediction, c.denoiser.schedule = "ddpm", "eps", "linear"
    c.noise.sigma_sampler, c.diffusion.weight = "discrete", "eps"
    c.diffusion.cond_dropout = 0.1
    c.optim.name, c.optim.learning_rate = "adamw", 1e-4
    c.optim.options = ConfigDict({"b1": 0.9, "b2": 0.999, "weight_decay": 0.0})
    c.ema.kind, c.ema.options = "constant", ConfigDict({"decay": 0.9999})
    c.train.steps = 7_000_000  # 1,400 epochs, as in DiT's script
    c.train.log_every, c.train.sample_every, c.train.save_every = 100, 50_000, 50_000
    c.mesh.data, c.mesh.fsdp = 1, -1
    c.sample.solver, c.sample.grid, c.sample.timestamps = "ancestral", "discrete", 250
    c.sample.sigma_min, c.sample.sigma_max = 0.01, 158.0  # the whole schedule
    c.sample.count = 16
    c.eval.preset, c.eval.net, c.eval.samples = "adm", "inception", 50_000
    if arg == "tiny":
        c.data.source, c.data.options = "digits", ConfigDict()
        c.data.batch_size = 16
        c.model.fields.update(depth=2, width=32, heads=2)
        c.train.steps, c.train.log_every, c.train.save_every = 4, 2, 2
        c.sample.timestamps, c.sample.count = 4, 4
        c.eval.preset, c.eval.net, c.eval.samples = "", "", 64
    c.lock()
    return c
