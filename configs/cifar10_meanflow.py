"""MeanFlow on CIFAR-10 (Geng et al. 2025) from data alone: EDM's DDPM++ UNet of 56.1 M parameters, one evaluation.

    jaxdiff train --config=cifar10_meanflow --workdir=runs/cifar10_meanflow
    jaxdiff evaluate --workdir=runs/cifar10_meanflow --config.eval.weights=inception.safetensors

The noise levels are those of the public implementation that reports FID 2.82: logit t ~ N(-0.6, 1.6^2), logit r ~
N(-4, 1.6^2), r = t on a quarter of the batch, then r = min(t, r); `:paper` has the paper's, FID 2.92: both
N(-2, 2^2), sorted. Weight 1/(|.|^2 + 1e-3)^0.75, learning rate 6e-4, batch 1024, dropout 0.2 and EDM's augmentation are
published. Not published there, chosen here: the number of images (800 M), the warm-up (10 M images), the average (half
life 0.5 M images) and EDM's preconditioning with samples that start at sigma = 80 (t = 0.988). The network is given tau
where the published one is given t - r. `:tiny` takes a few steps of a small network on the embedded digits.

GPUs or TPUs. Not run here.
"""

from ml_collections import ConfigDict

from jaxdiff.arguments import argument
from jaxdiff.configs import cifar10

ARGUMENTS = {
    "paper": "the noise levels of the paper",
    "tiny": "a few steps of a small network on the embedded digits",
}


def get_config(arg: str = "") -> ConfigDict:
    arg = argument(arg, ARGUMENTS)
    c = cifar10.get_config("tiny" if arg == "tiny" else "")
    with c.unlocked():
        c.method.name = "meanflow"
        c.model.fields.scalars = ("tau",)
        c.meanflow.mean, c.meanflow.std = -0.6, 1.6
        c.meanflow.tau_mean, c.meanflow.tau_std = -4.0, 1.6
        c.meanflow.order, c.meanflow.diagonal = "min", 0.25
        c.meanflow.loss_power, c.meanflow.loss_offset = 0.75, 1e-3
        if arg == "paper":
            c.meanflow.mean = c.meanflow.tau_mean = -2.0
            c.meanflow.std = c.meanflow.tau_std = 2.0
            c.meanflow.order = "sort"
        c.sample.solver, c.sample.final_denoise, c.sample.timestamps = "euler", False, 2
        if arg == "tiny":
            return c
        c.model.fields.dropout = 0.2
        c.data.batch_size = 1024
        c.optim.learning_rate = 6e-4
        c.train.steps = 800 * cifar10.MILLION // 1024
    return c
