"""EMD of an ImageNet-64 teacher (Xie et al. 2024): one step, K = 16.

    jaxdiff train --config=imagenet64_emd --config.teacher.path=edm.npz --workdir=runs/imagenet64_emd
    jaxdiff sample --workdir=runs/imagenet64_emd

The teacher is the released edm-imagenet-64x64-cond-adm, converted as docs/weights.md shows (the paper trained its own
of the same architecture); for one of your own add `--config.teacher.kind=run --config.teacher.path=runs/imagenet64`.
Training uses no data: `:blank` runs without the dataset. `:diff_instruct` is the one-step baseline of the paper,
`:tiny` takes a few steps of a small network on the embedded digits.

A pod: three networks, an average and two optimizers. Published: FID 2.20 with one evaluation, after 300,000 updates on
64 TPU v4 (8 days). Not run here. Known from the paper: K, the scheme, complete cancellation, the weight. From memory of
its tables, not verified: learning rates, batch, Adam's b1 and b2, step sizes, log-SNR -6 (sigma_max 20.09), length.
Not published, chosen here: the average, noise levels of the chains along EDM's sampling grid and their lower end, and
the same levels for the student score: 37 % of them are above sigma 10, 0.2 % of EDM's training levels.
"""

import math

from ml_collections import ConfigDict

from jaxdiff.arguments import argument
from jaxdiff.configs import imagenet64

ARGUMENTS = {
    "blank": "without the dataset",
    "diff_instruct": "one Langevin step that leaves z alone (Diff-Instruct)",
    "tiny": "a few steps of a small network on the embedded digits",
}


def get_config(arg: str = "") -> ConfigDict:
    arg = argument(arg, ARGUMENTS)
    c = imagenet64.get_config("tiny" if arg == "tiny" else "")
    with c.unlocked():
        distil(c, arg)
        c.teacher.kind, c.teacher.path = ("fresh", "") if arg == "tiny" else ("edm", "edm.npz")
        if arg == "blank":
            c.data.source, c.data.options = "blank", ConfigDict({"shape": (64, 64, 3), "num_classes": 1000})
    return c


def distil(c: ConfigDict, arg: str, batch_size: int = 128, steps: int = 300_000) -> None:
    """The paper's recipe."""
    c.method.name = "emd"
    c.emd.update(steps=16, scheme="eps,z", step_eps=0.16, step_z=1.6e-5, score_rate=1e-5)
    c.emd.sigma_sampler, c.emd.sigma_options = "polynomial", ConfigDict({"sigma_min": 0.02, "sigma_max": 80.0})
    c.optim.learning_rate, c.optim.warmup_images, c.optim.decay = 2e-6, 0, "constant"
    c.optim.options = ConfigDict({"b1": 0.0, "b2": 0.99})
    c.ema.kind, c.ema.options = "constant", ConfigDict({"decay": 0.9999})
    c.diffusion.cond_dropout = 0.0
    c.sample.solver, c.sample.timestamps, c.sample.final_denoise, c.sample.sigma_max = "euler", 1, True, math.exp(3)
    if "dropout" in c.model.fields:
        c.model.fields.dropout = 0.0
    if arg == "tiny":
        c.emd.steps = 2
        return
    if arg == "diff_instruct":
        c.emd.steps, c.emd.scheme = 1, "eps"
    c.data.batch_size = batch_size
    c.train.steps = steps
    c.train.log_every, c.train.sample_every, c.train.save_every = 100, 2000, 2000
