"""A small MLP on a mixture of 25 Gaussians in the plane, whose exact denoiser is `denoisers.gaussian_mixture`.

    jaxdiff train --config=mixture2d --workdir=runs/mixture2d

Any CPU; under a minute on two cores. The sliced Wasserstein distance of 10,000 samples to the data ends near 0.033;
two halves of the data, the best that samples can reach, are 0.021 apart. `:tiny` takes a few steps.
"""

from ml_collections import ConfigDict

from jaxdiff.arguments import argument
from jaxdiff.configs import default

ARGUMENTS = {
    "tiny": "a few steps of a small network",
}


def get_config(arg: str = "") -> ConfigDict:
    arg = argument(arg, ARGUMENTS)
    c = default.get_config()
    c.data.source = "mixture"
    c.data.options = ConfigDict({"preset": "grid", "std": 0.05})
    c.data.batch_size = 256
    c.model.name = "mlp"
    c.model.fields = ConfigDict({"width": 64, "depth": 3, "num_classes": 0})  # 0: not conditioned on the mode
    c.denoiser.sigma_data = 0.71
    c.optim.learning_rate = 2e-3
    c.optim.decay, c.optim.decay_images = "cosine", 256 * 4000
    c.ema.options = ConfigDict({"images": 50_000.0, "ramp": 0.05})
    c.train.steps = 4000
    c.train.log_every, c.train.eval_every, c.train.save_every = 500, 4000, 2000
    c.sample.batch_size = 5000
    c.eval.net, c.eval.samples = "", 10_000
    if arg == "tiny":
        c.data.options.count = 256
        c.data.batch_size = 16
        c.model.fields.update(width=16, depth=1)
        c.train.steps, c.train.log_every, c.train.eval_every, c.train.save_every = 4, 2, 4, 2
        c.sample.timestamps, c.eval.samples = 4, 64
    c.lock()
    return c
