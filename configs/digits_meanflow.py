"""MeanFlow on the embedded 8x8 digits, from data alone or from a teacher: samples in one jump, or in any number.

    jaxdiff train --config=digits_meanflow --workdir=runs/digits_meanflow
    jaxdiff sample --workdir=runs/digits_meanflow --nfe=2

`:distil` learns the trajectories of the teacher at config.teacher.path instead, and starts from its weights:

    jaxdiff train --config=digits --workdir=runs/digits
    jaxdiff train --config=digits_meanflow:distil --config.teacher.path=runs/digits --workdir=runs/digits_one

Any CPU, in minutes. `:tiny` takes a few steps of a small network. The network and data are those of `digits`; noise
levels and the weight of the loss are MeanFlow's for CIFAR-10.
"""

from ml_collections import ConfigDict

from jaxdiff.arguments import argument
from jaxdiff.configs import digits

ARGUMENTS = {
    "distil": "from the teacher at config.teacher.path",
    "tiny": "a few steps of a small network",
}


def get_config(arg: str = "") -> ConfigDict:
    arg = argument(arg, ARGUMENTS)
    c = digits.get_config("tiny" if arg == "tiny" else "")
    with c.unlocked():
        c.method.name = "meanflow"
        c.model.fields.scalars = ("tau",)
        c.sample.solver, c.sample.final_denoise = "euler", False
        c.sample.sigma_max, c.sample.timestamps = 5.0, 2
        if arg == "tiny":
            return c
        c.train.steps, c.optim.learning_rate = 4000, 1e-3
        if arg == "distil":
            c.meanflow.distil, c.teacher.path = True, "runs/digits"
            c.train.steps, c.optim.warmup_images = 1000, 0
        c.train.log_every, c.train.save_every = 100, c.train.steps // 2
        c.optim.decay_images = c.data.batch_size * c.train.steps
    return c
