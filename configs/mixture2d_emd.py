"""EMD of the exact denoiser of 25 Gaussians in the plane: a one-step generator trained from scratch.

    jaxdiff train --config=mixture2d_emd --workdir=runs/mixture2d_emd

Any CPU, in minutes. The student score must keep up with the generator, so its rate is four times the generator's
(docs/emd.md). `:diff_instruct` is the same with one Langevin step that leaves z alone (Diff-Instruct); `:tiny` takes a
few steps.
"""

from ml_collections import ConfigDict

from jaxdiff.arguments import argument
from jaxdiff.configs import mixture2d

ARGUMENTS = {
    "diff_instruct": "one Langevin step that leaves z alone (Diff-Instruct)",
    "tiny": "a few steps of a small network",
}


def get_config(arg: str = "") -> ConfigDict:
    arg = argument(arg, ARGUMENTS)
    c = mixture2d.get_config("tiny" if arg == "tiny" else "")
    with c.unlocked():
        c.method.name = "emd"
        c.teacher.kind = "analytic"
        c.model.fields.frequencies = 3
        c.emd.steps, c.emd.step_z, c.emd.clip_z, c.emd.sigma_min = 16, 1e-3, 5.0, 0.05
        c.emd.score_levels = "noise"  # which covers the levels of the chains
        c.emd.sigma_sampler, c.emd.sigma_options = "lognormal", ConfigDict({"mean": -1.5, "std": 1.0})
        c.emd.score_rate, c.emd.score_updates = 2e-3, 4
        c.optim.learning_rate, c.optim.options = 5e-4, ConfigDict({"b1": 0.0, "b2": 0.99})
        c.sample.solver, c.sample.timestamps, c.sample.sigma_max = "euler", 1, 1.0
        if arg == "tiny":
            c.emd.steps = 2
            return c
        if arg == "diff_instruct":
            c.emd.steps, c.emd.scheme = 1, "eps"
        c.data.batch_size = 256
        c.train.steps, c.train.eval_every, c.train.save_every = 4000, 4000, 1000
        c.optim.decay_images = c.data.batch_size * c.train.steps
    return c
