"""SFD of FLUX.1-dev (Zhou et al. 2024; Black Forest Labs 2024): four Euler steps at 1024x1024, by low-rank updates.

    jaxdiff train --config=flux_sfd --config.data.options.path=prompts --workdir=runs/flux_sfd

The teacher, flux.safetensors, is the transformer of the public release, under the diffusers library's names or its own
(docs/weights.md; `--config.teacher.path` names another file). No images are needed: `prompts` is a folder with
text.npy, T5-XXL embeddings [prompts + 1, 512, 4096], and pooled.npy, CLIP-L's pooled ones [prompts + 1, 768], the last
row that of the empty prompt. The student is an update of rank 64 of the blocks' kernels, merged into the export; the
teacher is its frozen base, so that the 11901.4 M parameters are held once. `:full` trains all of them, `:blank` plans
or tries it without prompts, `:tiny` takes a few steps of a small network without files.

A pod: docs/results/pods.md has the state per chip. Nobody has published this recipe and it was not run here: rank,
rates, length, batch and noise levels are choices, K, loss and solver are SFD's. Noise levels are FLUX's for 4,096 image
tokens: those of a uniform grid in flow time, times exp(1.15). The guidance that dev imitates stays at 3.5.
"""

import math

from ml_collections import ConfigDict

from jaxdiff.arguments import argument
from jaxdiff.configs import default

ARGUMENTS = {
    "full": "all parameters are trained",
    "blank": "without prompts",
    "tiny": "a few steps of a small network, without files",
}


def get_config(arg: str = "") -> ConfigDict:
    arg = argument(arg, ARGUMENTS)
    c = default.get_config()
    network(c, arg)
    c.method.name = "sfd"
    c.sfd.nfe, c.sfd.substeps, c.sfd.solver = (4,), 4, "dpmpp2m"
    c.sample.solver, c.sample.timestamps, c.sample.final_denoise = "euler", 5, False
    c.optim.learning_rate = 1e-4
    if arg == "tiny":
        c.sfd.nfe, c.sfd.substeps, c.sample.timestamps = (2,), 2, 3
    c.lock()
    return c


def network(c: ConfigDict, arg: str) -> None:
    """FLUX.1-dev as a teacher, and how it is trained and sampled at 1024x1024."""
    c.data.source, c.data.options = "prompts", ConfigDict({"path": "prompts", "shape": (128, 128, 16)})
    c.data.batch_size = 64
    c.model.name, c.model.dtype, c.model.remat = "flux", "bfloat16", "full"
    c.model.fields = ConfigDict({"scan": True})
    c.denoiser.kind = "flow"
    c.noise.sigma_sampler, c.noise.mean, c.noise.std, c.noise.shift = "logit_normal", 0.0, 1.0, math.exp(1.15)
    c.teacher.kind, c.teacher.path = "flux", "flux.safetensors"
    c.lora.rank, c.lora.targets = 64, "^(blocks|single)/"
    c.optim.name, c.optim.options = "adamw", ConfigDict({"b1": 0.9, "b2": 0.99, "weight_decay": 0.0})
    c.optim.clip = 1.0
    c.train.steps, c.train.log_every, c.train.save_every = 10_000, 10, 500
    c.mesh.data, c.mesh.fsdp, c.mesh.gather_first = 1, -1, True
    c.sample.grid, c.sample.batch_size, c.sample.count = "flow", 64, 16
    c.eval.net = ""
    if arg == "full":
        c.lora.rank = 0
    if arg in ("blank", "tiny"):
        c.data.source = "blank"
        c.data.options = ConfigDict({"shape": (128, 128, 16), "text": (512, 4096), "pooled": 768})
    if arg == "tiny":
        c.data.options = ConfigDict({"shape": (4, 8, 4), "text": (3, 16), "pooled": 8})
        c.data.batch_size, c.lora.rank = 8, 2
        fields = {"depth": 1, "single_depth": 2, "width": 16, "heads": 2, "axes": (2, 2, 4), "pooled_dim": 8}
        c.model.fields = ConfigDict({**fields, "scan": True})
        c.model.dtype, c.teacher.kind, c.teacher.path = "float32", "fresh", ""
        c.train.steps, c.train.log_every, c.train.save_every = 4, 2, 2
        c.sample.count, c.eval.samples, c.eval.reference = 4, 64, 64
