"""SFD-v of EDM's ImageNet-64 teacher (Zhou et al. 2024): one student for 2, 3, 4 and 5 evaluations.

    jaxdiff train --config=imagenet64_sfd --config.teacher.path=edm.npz --workdir=runs/imagenet64_sfd
    jaxdiff sample --workdir=runs/imagenet64_sfd --nfe=2

The teacher is the released edm-imagenet-64x64-cond-adm, converted as docs/weights.md shows; for one of your own add
`--config.teacher.kind=run --config.teacher.path=runs/imagenet64`. `:2`, `:3`, `:4`, `:5` distil for that number of
evaluations alone; `:second` distils the SFD-v student in runs/imagenet64_sfd further, to one evaluation;
`:blank`, or `:2,blank` and so on, runs without the dataset, which training does not use; `:tiny` takes a few steps of a
small network on the embedded digits.

GPUs or TPUs; `--config.optim.accum_steps` and `--config.mesh.fsdp` make it fit fewer of them. Published FID and
A100-hours: SFD 10.25 / 6.35 / 4.99 / 4.33 at 2 / 3 / 4 / 5 evaluations in 3.34 / 4.63 / 5.98 / 7.11 hours; SFD-v
9.47 / 5.78 / 4.72 / 4.21 in 23.62; second stage 12.89 at one evaluation in 6.86. Not run here. The second stage's
learning rate, ten times the first's, is known for CIFAR-10 only.
"""

from ml_collections import ConfigDict

from jaxdiff.arguments import arguments
from jaxdiff.configs import cifar10_sfd, imagenet64

ARGUMENTS = {
    "2": "2 evaluations alone",
    "3": "3 evaluations alone",
    "4": "4 evaluations alone",
    "5": "5 evaluations alone",
    "second": "the second stage, to one evaluation",
    "blank": "without the dataset",
    "tiny": "a few steps of a small network on the embedded digits",
}


def get_config(arg: str = "") -> ConfigDict:
    kind, blank = cifar10_sfd.split(arguments(arg, ARGUMENTS))
    c = imagenet64.get_config("tiny" if kind == "tiny" else "")
    with c.unlocked():
        cifar10_sfd.distil(c, kind, learning_rate=1e-5)
        if kind != "tiny":
            c.teacher.path = "runs/imagenet64_sfd" if kind == "second" else "edm.npz"
        if blank:
            c.data.source, c.data.options = "blank", ConfigDict({"shape": (64, 64, 3), "num_classes": 1000})
    return c
