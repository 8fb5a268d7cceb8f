"""SFD-v on the mixture of 25 Gaussians, with its exact denoiser as the teacher; the student is an untrained MLP.

    jaxdiff train --config=mixture2d_sfd --workdir=runs/mixture2d_sfd
    jaxdiff evaluate --workdir=runs/mixture2d_sfd --nfe=2

Any CPU, about a minute on two cores. `:tiny` takes a few steps.
"""

from ml_collections import ConfigDict

from jaxdiff.arguments import argument
from jaxdiff.configs import mixture2d

ARGUMENTS = {
    "tiny": "a few steps of a small network",
}


def get_config(arg: str = "") -> ConfigDict:
    arg = argument(arg, ARGUMENTS)
    c = mixture2d.get_config(arg)
    with c.unlocked():
        c.method.name = "sfd"
        c.teacher.kind = "analytic"
        c.model.fields.step_embed = "zero"
        c.sfd.nfe = (2, 3, 4, 5)
        c.sample.solver, c.sample.final_denoise, c.sample.afs = "euler", False, True
        c.sample.sigma_min = 0.006
        c.sample.timestamps = 7
        if arg == "tiny":
            c.sfd.nfe, c.sfd.substeps, c.sample.timestamps = (2, 3), 2, 4
            return c
        c.train.steps, c.train.eval_every, c.train.save_every = 3000, 3000, 1000
        c.optim.decay_images = c.data.batch_size * c.train.steps
    return c
