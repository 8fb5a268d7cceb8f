"""MMDiT-XL/2 from text at 512x512 (Esser et al. 2024): rectified flow on 64x64x4 latents, 1326.6 M
parameters with text embeddings of width 768.

    jaxdiff train --config=t2i512_mmdit --config.data.options.path=latents.npz --workdir=runs/mmdit

latents.npz is written by `jaxdiff.autoencoders.write` with captions and caption_ids;
`--config.data.options.caption_text` names the folder with the captions' embeddings (docs/t2i.md). `:blank` plans or
tries it without data: latents of zeros, 77 tokens of width 768. `:S`, `:B`, `:L` and `:XL` choose the size, `:tiny`
takes a few steps of a small one.

A pod: docs/results/pods.md has the memory per chip. Not run here; the learning rate, batch and length are those of
imagenet256_dit, the noise levels logit-normal and shifted by 2 as SD3's are for larger images.
"""

from ml_collections import ConfigDict

from jaxdiff.arguments import argument
from jaxdiff.configs import default
from jaxdiff.models import mmdit

ARGUMENTS = {
    "S": "MMDiT-S/2",
    "B": "MMDiT-B/2",
    "L": "MMDiT-L/2",
    "XL": "MMDiT-XL/2, the default",
    "blank": "without data",
    "tiny": "a few steps of a small network, without data",
}


def get_config(arg: str = "") -> ConfigDict:
    arg = argument(arg, ARGUMENTS)
    c = default.get_config()
    c.data.source = "latents"
    c.data.options = ConfigDict({"path": "latents512.npz", "caption_text": "captions512"})
    c.data.batch_size = 256
    c.model.name = "mmdit"
    size = mmdit.SIZES.get(arg, mmdit.SIZES["XL"])
    c.model.fields = ConfigDict({**size, "patch": 2, "pooled_dim": 0, "scan": True})
    c.model.dtype, c.model.remat = "bfloat16", "full"
    c.denoiser.kind = "flow"
    c.noise.sigma_sampler, c.noise.mean, c.noise.std, c.diffusion.weight = "logit_normal", 0.0, 1.0, "flow"
    c.noise.shift = 2.0
    c.diffusion.cond_dropout = 0.1
    c.optim.name, c.optim.learning_rate, c.optim.clip = "adamw", 1e-4, 1.0
    c.optim.options = ConfigDict({"b1": 0.9, "b2": 0.95, "weight_decay": 0.0})
    c.ema.kind, c.ema.options = "constant", ConfigDict({"decay": 0.9999})
    c.train.steps, c.train.log_every, c.train.sample_every, c.train.save_every = 500_000, 100, 10_000, 10_000
    c.mesh.data, c.mesh.fsdp = 1, -1
    c.mesh.gather_first = True
    c.sample.solver, c.sample.timestamps, c.sample.guidance = "dpmpp2m", 32, 4.0
    c.sample.batch_size, c.sample.count = 64, 16
    c.eval.net, c.eval.samples = "", 10_000
    if arg in ("blank", "tiny"):
        c.data.source, c.data.options = "blank", ConfigDict({"shape": (64, 64, 4), "text": (77, 768)})
    if arg == "tiny":
        c.data.options = ConfigDict({"shape": (8, 8, 4), "text": (3, 16)})
        c.model.fields.update(depth=2, width=32, heads=2)
        c.data.batch_size, c.train.steps, c.train.log_every, c.train.save_every = 8, 4, 2, 2
        c.sample.timestamps, c.sample.count, c.eval.samples = 3, 4, 8
    c.lock()
    return c
