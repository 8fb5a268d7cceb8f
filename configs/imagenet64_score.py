"""Score distillation of EDM's ImageNet-64 teacher into one step: SiD (Zhou et al. 2024), or another rule by its name.

    jaxdiff train --config=imagenet64_score --config.teacher.path=edm.npz --workdir=runs/imagenet64_sid
    jaxdiff sample --workdir=runs/imagenet64_sid

The teacher is the released edm-imagenet-64x64-cond-adm, converted as docs/weights.md shows; for one of your own add
`--config.teacher.kind=run --config.teacher.path=runs/imagenet64`. `:diff_instruct`, `:dmd2`, `:f_distill` and
`:uni_instruct` select another rule, the last three with real images; `:blank` runs without the dataset, which SiD and
Diff-Instruct do not use; `:tiny` takes a few steps of a small network on the embedded digits.

A pod: three networks, an average and two optimizers. Published FID with one evaluation: SiD 1.524, with a head and real
images 1.110, Uni-Instruct 1.02, DMD2 1.28. Not run here. Which settings are known is listed in
`configs/cifar10_score.py`, whose settings these are but for the rate and the batch, which are from memory of SiD's and
DMD2's scripts.
"""

from ml_collections import ConfigDict

from jaxdiff.arguments import arguments
from jaxdiff.configs import cifar10_score, imagenet64

ARGUMENTS = {
    "diff_instruct": "Diff-Instruct",
    "dmd2": "DMD2, with real images",
    "f_distill": "f-distill, with real images",
    "uni_instruct": "Uni-Instruct, with real images",
    "blank": "without the dataset",
    "tiny": "a few steps of a small network on the embedded digits",
}


def get_config(arg: str = "") -> ConfigDict:
    rule, flags = cifar10_score.split(arguments(arg, ARGUMENTS))
    c = imagenet64.get_config("tiny" if "tiny" in flags else "")
    with c.unlocked():
        cifar10_score.distil(c, rule, "tiny" in flags, rate=4e-6, batch_size=8192)
        if "tiny" in flags:
            return c
        if rule in ("dmd2", "f_distill"):
            c.optim.learning_rate = c[rule].score_rate = 2e-6
            c.data.batch_size, c.train.steps, c[rule].gan = 280, 400_000, 3e-3
        c.ema.options = ConfigDict({"images": 2.0 * imagenet64.MILLION, "ramp": 0.05})
        if "blank" in flags:
            c.data.source, c.data.options = "blank", ConfigDict({"shape": (64, 64, 3), "num_classes": 1000})
    return c
