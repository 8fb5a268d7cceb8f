"""DMD of FLUX.1-dev (Yin et al. 2024; Black Forest Labs 2024): one step at 1024x1024, by low-rank updates.

    jaxdiff train --config=flux_dmd --config.data.options.path=prompts --workdir=runs/flux_dmd

Teacher and prompts are those of flux_sfd. The generator and the student score are updates of rank 64 of the teacher,
which is held once. There are no real images, so `dmd2.gan` is 0: distribution matching alone, with DMD2's five updates
of the student score per update of the generator. `:full` trains all of their parameters, `:blank` plans or tries it
without prompts, `:tiny` takes a few steps of a small network without files.

A pod: docs/results/pods.md has the state per chip. Nobody has published this recipe and it was not run here: rank,
rates, length, batch and noise levels are choices. The generator starts at flow time 0.98.
"""

from ml_collections import ConfigDict

from jaxdiff.arguments import argument
from jaxdiff.configs import default, flux_sfd

ARGUMENTS = {
    "full": "all parameters are trained",
    "blank": "without prompts",
    "tiny": "a few steps of a small network, without files",
}


def get_config(arg: str = "") -> ConfigDict:
    arg = argument(arg, ARGUMENTS)
    c = default.get_config()
    flux_sfd.network(c, arg)
    c.method.name = "dmd2"
    c.dmd2.update(gan=0.0, score_updates=5, score_weight="flow", score_rate=1e-4)
    c.sample.solver, c.sample.timestamps, c.sample.final_denoise, c.sample.sigma_max = "euler", 1, True, 49.0
    c.optim.learning_rate = 1e-5
    c.ema.kind, c.ema.options = "constant", ConfigDict({"decay": 0.999})
    c.lock()
    return c
