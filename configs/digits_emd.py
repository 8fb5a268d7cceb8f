"""EMD of the digits' teacher: a one-step generator.

    jaxdiff train --config=digits --workdir=runs/digits
    jaxdiff train --config=digits_emd --config.teacher.path=runs/digits --workdir=runs/digits_emd
    jaxdiff sample --workdir=runs/digits_emd

Any CPU, in minutes; the quickstart trains it. With so few updates the learning rates are larger than the paper's, and
the student score is updated three times per update of the generator. `:diff_instruct` is the same with one Langevin
step that leaves z alone (Diff-Instruct); `:tiny` takes a few steps of a small network, its teacher untrained.
"""

from ml_collections import ConfigDict

from jaxdiff.arguments import argument
from jaxdiff.configs import digits

ARGUMENTS = {
    "diff_instruct": "one Langevin step that leaves z alone (Diff-Instruct)",
    "tiny": "a few steps of a small network, its teacher untrained",
}


def get_config(arg: str = "") -> ConfigDict:
    arg = argument(arg, ARGUMENTS)
    c = digits.get_config("tiny" if arg == "tiny" else "")
    with c.unlocked():
        c.method.name = "emd"
        c.teacher.path = "runs/digits"
        c.emd.steps = 4
        c.emd.score_levels = "noise"  # those of the teacher, which reach far enough
        c.emd.sigma_sampler, c.emd.sigma_options = "lognormal", ConfigDict({"mean": -0.4, "std": 1.2})
        c.emd.score_updates, c.emd.score_rate = 3, 1e-3
        c.optim.learning_rate = 3e-4
        c.optim.options = ConfigDict({"b1": 0.0, "b2": 0.99})
        c.optim.warmup_images = 0
        c.sample.solver, c.sample.timestamps, c.sample.sigma_max = "euler", 1, 5.0
        c.ema.options = ConfigDict({"images": 6400.0, "ramp": 0.1})
        if arg == "tiny":
            c.teacher.kind, c.teacher.path = "fresh", ""
            c.emd.steps = 2
            return c
        if arg == "diff_instruct":
            c.emd.steps, c.emd.scheme = 1, "eps"
        c.train.steps, c.train.log_every, c.train.save_every = 300, 25, 150
        c.optim.decay_images = c.data.batch_size * c.train.steps
    return c
