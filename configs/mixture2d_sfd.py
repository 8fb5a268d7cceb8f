"""SFD-v on the mixture of 25 Gaussians, taught by its exact denoiser; the student is an untrained MLP.

    jaxdiff train --config=configs/mixture2d_sfd.py --workdir=runs/mixture2d_sfd
    jaxdiff evaluate --workdir=runs/mixture2d_sfd --nfe=2

Any CPU, about a minute on two cores. `:tiny` takes a few steps.
"""

from ml_collections import ConfigDict

from jaxdiff.configs import mixture2d


def get_config(arg: str = "") -> ConfigDict:
    if arg not in ("", "tiny"):
        raise ValueError(f"mixture2d_sfd takes the argument 'tiny' or none, got {arg!r}")
    c = mixture2d.get_config(arg)
    with c.unlocked():
        c.method.name = "sfd"
        c.teacher.kind = "analytic"
        c.model.fields.step_embed = "zero"
        c.sfd.nfe = (2, 3, 4, 5)
        c.sample.solver, c.sample.to_zero, c.sample.afs = "euler", False, True
        c.sample.sigma_min = 0.006
        c.sample.steps = 7
        if arg == "tiny":
            c.sfd.nfe, c.sfd.substeps, c.sample.steps = (2, 3), 2, 4
            return c
        c.train.steps, c.train.eval_every, c.train.save_every = 3000, 3000, 1000
        c.optim.decay_images = c.data.batch_size * c.train.steps
    return c
