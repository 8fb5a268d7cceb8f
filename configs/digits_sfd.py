"""SFD-v of the digits' teacher: one student for 2, 3, 4 and 5 evaluations.

    jaxdiff train --config=digits --workdir=runs/digits
    jaxdiff train --config=digits_sfd --config.teacher.path=runs/digits --workdir=runs/digits_sfd
    jaxdiff sample --workdir=runs/digits_sfd --nfe=2

`:second` distils that student further, to one evaluation:

    jaxdiff train --config=digits_sfd:second --config.teacher.path=runs/digits_sfd --workdir=runs/digits_one

Any CPU, in minutes; the quickstart trains both. `:long` is for the teacher of `--config=digits:long`, three times as
long; `:tiny` takes a few steps of a small network, its teacher untrained. With so few iterations the learning rate is
larger than the paper's and falls to zero; K = 3 and DPM-Solver++(2M) instead of K = 4 and DPM-Solver++(3M) save a
quarter of the teacher's evaluations.
"""

from ml_collections import ConfigDict

from jaxdiff.arguments import argument
from jaxdiff.configs import digits

ARGUMENTS = {
    "long": "for the teacher of digits:long, three times as long",
    "second": "the second stage, to one evaluation",
    "tiny": "a few steps of a small network, its teacher untrained",
}


def get_config(arg: str = "") -> ConfigDict:
    arg = argument(arg, ARGUMENTS)
    c = digits.get_config("tiny" if arg == "tiny" else "")
    with c.unlocked():
        c.method.name = "sfd"
        c.model.fields.step_embed = "zero"
        c.teacher.path = "runs/digits_sfd" if arg == "second" else "runs/digits"
        c.sfd.nfe, c.sfd.substeps, c.sfd.solver = (2, 3, 4, 5), 3, "dpmpp2m"
        c.optim.learning_rate = 1e-3
        c.optim.warmup_images = 0
        c.sample.solver, c.sample.final_denoise, c.sample.afs = "euler", False, True
        c.sample.sigma_min = 0.006
        c.sample.timestamps = 7
        if arg == "tiny":
            c.teacher.kind, c.teacher.path = "fresh", ""
            c.sfd.nfe, c.sample.timestamps = (2, 3), 4
            return c
        c.train.steps, c.train.log_every, c.train.save_every = 110, 10, 100
        if arg == "long":
            c.train.steps, c.train.log_every = 330, 30
        if arg == "second":
            c.sfd.nfe, c.sample.timestamps = (1,), 3
            c.sfd.solver, c.sfd.teacher_afs, c.sfd.teacher_step = "euler", True, 7
            c.train.steps, c.train.log_every = 300, 50
        c.optim.decay_images = c.data.batch_size * c.train.steps
    return c
