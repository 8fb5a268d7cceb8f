"""SFD-v of EDM's CIFAR-10 teacher (Zhou et al. 2024): one student for 2, 3, 4 and 5 evaluations.

    jaxdiff train --config=cifar10_sfd --config.teacher.path=edm.npz --workdir=runs/cifar10_sfd
    jaxdiff sample --workdir=runs/cifar10_sfd --nfe=2

The teacher is the released edm-cifar10-32x32-uncond-vp, converted as docs/weights.md shows. For one trained with
`--config=cifar10` add `--config.teacher.kind=run --config.teacher.path=runs/cifar10`. `:2`, `:3`, `:4`, `:5` distil for
that number of evaluations alone; `:second` distils the SFD-v student in runs/cifar10_sfd further, to one evaluation,
with L1 and LPIPS (`--config.sfd.loss=l1` needs no LPIPS weights); `:blank`, or `:2,blank` and so on, runs without the
dataset, which training does not use; `:tiny` takes a few steps of a small network on the embedded digits.

GPUs or TPUs. Published FID and A100-hours: SFD 4.53 / 3.58 / 3.24 / 3.06 at 2 / 3 / 4 / 5 evaluations in
0.64 / 0.92 / 1.17 / 1.42 hours; SFD-v 4.28 / 3.50 / 3.18 / 2.95 in 4.26; second stage 5.83 at one evaluation in 4.88.
Not run here. The paper computes in float16; `--config.model.dtype=bfloat16` is the nearest to it.
"""

from ml_collections import ConfigDict

from jaxdiff.arguments import arguments
from jaxdiff.configs import cifar10

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
    kind, blank = split(arguments(arg, ARGUMENTS))
    c = cifar10.get_config("tiny" if kind == "tiny" else "")
    with c.unlocked():
        cifar10.without_augmentation(c)
        distil(c, kind, learning_rate=5e-5)
        if kind != "tiny":
            c.model.fields.augment_dim = 9  # of the released network; zeros are passed
            c.teacher.path = "runs/cifar10_sfd" if kind == "second" else "edm.npz"
        if blank:
            c.data.source, c.data.options = "blank", ConfigDict({"shape": (32, 32, 3), "num_classes": 0})
    return c


def split(given: list[str]) -> tuple[str, bool]:
    """What is distilled, and whether without the data: [], ["blank"], ["2"], ["2", "blank"]."""
    kinds = [part for part in given if part != "blank"]
    if len(kinds) > 1:
        raise ValueError(f"{' and '.join(kinds)} exclude each other; give one, with or without blank")
    return kinds[0] if kinds else "", "blank" in given


def distil(c: ConfigDict, arg: str, learning_rate: float) -> None:
    """The paper's recipe: DPM-Solver++(3M), K = 4, L1, Adam with a tenth of the rate from half way on, no averaging.

    The authors' code lowers the rate at the end of the first iteration that starts half way or later.
    """
    several = arg not in ("2", "3", "4", "5")
    c.method.name = "sfd"
    c.teacher.kind = "run" if arg == "second" else "fresh" if arg == "tiny" else "edm"
    c.model.fields.step_embed = "zero" if several else ""
    c.sfd.nfe = (2, 3, 4, 5) if several else (int(arg),)
    c.sample.solver, c.sample.final_denoise, c.sample.afs = "euler", False, True
    c.sample.sigma_min = 0.006
    c.optim.learning_rate, c.optim.warmup_images = learning_rate, 0
    if arg == "tiny":
        c.sfd.nfe, c.sfd.substeps, c.sample.timestamps = (2, 3), 2, 4
        return
    trajectories = 800_000 if several else 200_000
    if arg == "second":  # ten times the rate of the first stage
        c.sfd.nfe, c.sfd.substeps, c.sfd.solver = (1,), 3, "euler"
        c.sfd.teacher_afs, c.sfd.teacher_step = True, 7
        c.sfd.loss = "l1+lpips"
        c.sfd.lpips.update(weights="lpips.npz", net="vgg", pool="avg", resize=224, as_unit=True)
        c.optim.learning_rate, trajectories = 10 * learning_rate, 2_000_000
    c.sample.timestamps = max(c.sfd.nfe) + 2
    c.data.batch_size = 128
    c.optim.decay, c.optim.decay_images = "step", trajectories // 2 + 128
    c.train.steps = -(-trajectories // 128)
    c.train.log_every, c.train.sample_every, c.train.save_every = 50, 500, 500
