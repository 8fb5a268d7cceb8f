"""EMD of Stable Diffusion 1.5 in its latent space (Xie et al. 2024): one step, K = 8.

    jaxdiff train --config=sd15_emd --config.data.options.path=prompts --workdir=runs/sd15_emd

The teacher, unet.safetensors, is the UNet of the public release under the diffusers library's names (docs/weights.md;
`--config.teacher.path` names another file). No images are needed: `prompts` is a folder with text.npy, CLIP
embeddings [prompts + 1, 77, 768], the last row that of the empty prompt. Samples are latents; `autoencoder.kind` and
`autoencoder.path` decode them. `:tiny` takes a few steps of a small network, without files.

A pod: three networks of 860 M, an average and two optimizers. Published: FID 9.66 on COCO prompts with one evaluation
(K = 8, noise level of timestep 500). From memory of the paper's tables, not verified: step sizes, learning rates,
batch, Adam's b1 and b2. Not published, chosen here: guidance (1.75), length, the average, input scale. Not run here.
"""

from ml_collections import ConfigDict

from jaxdiff.arguments import argument
from jaxdiff.configs import default, imagenet64_emd
from jaxdiff.schedules import sigma_table, sqrt_linear_alpha_bar

ARGUMENTS = {
    "tiny": "a few steps of a small network, without files",
}


def get_config(arg: str = "") -> ConfigDict:
    arg = argument(arg, ARGUMENTS)
    c = default.get_config()
    c.data.source = "prompts"
    c.data.options = ConfigDict({"path": "prompts", "shape": (64, 64, 4)})
    c.model.name = "latent_unet"
    c.model.dtype, c.model.remat = "bfloat16", "full"
    c.denoiser.kind, c.denoiser.schedule = "ddpm", "sqrt_linear"
    c.noise.sigma_sampler, c.emd.score_weight = "discrete", "eps"
    imagenet64_emd.distil(c, arg, batch_size=1024, steps=100_000)
    c.emd.update(steps=8, step_eps=0.09, step_z=2.5e-5, guidance=1.75)
    c.emd.sigma_sampler, c.emd.sigma_options = "", ConfigDict()
    c.teacher.kind, c.teacher.path = "sd_unet", "unet.safetensors"
    c.sample.sigma_max = float(sigma_table(sqrt_linear_alpha_bar())[500])
    c.sample.batch_size, c.sample.count = 64, 64
    c.eval.net = ""
    if arg == "tiny":
        c.data.source, c.data.options = "blank", ConfigDict({"shape": (8, 8, 4), "text": (3, 16)})
        c.data.batch_size = 8
        fields = {"width": 8, "channel_mult": (1, 2), "blocks": 1, "depths": (1, 0), "heads": 2, "text_dim": 16}
        c.model.fields = ConfigDict({**fields, "groups": 4})
        c.model.dtype, c.model.remat = "float32", ""
        c.teacher.kind, c.teacher.path, c.emd.steps = "fresh", "", 2
        c.train.steps, c.train.log_every, c.train.save_every = 4, 2, 2
        c.sample.count, c.eval.samples, c.eval.reference = 4, 64, 64
    c.lock()
    return c
