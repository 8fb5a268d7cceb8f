"""Score distillation of EDM's CIFAR-10 teacher into one step: SiD (Zhou et al. 2024), or another rule by its name.

    jaxdiff train --config=cifar10_score --config.teacher.path=edm.npz --workdir=runs/cifar10_sid
    jaxdiff sample --workdir=runs/cifar10_sid

The teacher is the released edm-cifar10-32x32-uncond-vp, converted as docs/weights.md shows; for one of your own add
`--config.teacher.kind=run --config.teacher.path=runs/cifar10`. `:diff_instruct`, `:dmd2`, `:f_distill` and
`:uni_instruct` select another rule, the last three with real images; `:cond` the class-conditional teacher, as in
`:dmd2,cond`; `:blank` runs without the dataset, which SiD and Diff-Instruct do not use; `:tiny` takes a few steps of a
small network on the embedded digits.

GPUs or TPUs. Published FID with one evaluation, unconditional / conditional: SiD 1.923 / 1.710, with a head and real
images 1.499 / 1.396, Uni-Instruct 1.46 / 1.38; DMD2 2.13 conditional. Not run here.

Known for SiD (its code): alpha, noise levels of the generator and of the student score, sigma_max 2.5, rates, Adam's b1
and b2, batch, average. The student score is then used at levels where it is hardly trained, of which a warning tells.
Known for DMD2 (FastGen's settings): gan, 5 score updates, batch, number of updates; its rates and the head's weight are
from memory. Chosen here: the length of SiD, and for the other rules what is not theirs: SiD's for Uni-Instruct and
Diff-Instruct, DMD2's for f-distill, and the running means of the ratio.
"""

from ml_collections import ConfigDict

from jaxdiff.arguments import arguments
from jaxdiff.configs import cifar10

ARGUMENTS = {
    "diff_instruct": "Diff-Instruct",
    "dmd2": "DMD2, with real images",
    "f_distill": "f-distill, with real images",
    "uni_instruct": "Uni-Instruct, with real images",
    "cond": "the class-conditional teacher",
    "blank": "without the dataset",
    "tiny": "a few steps of a small network on the embedded digits",
}


def get_config(arg: str = "") -> ConfigDict:
    rule, flags = split(arguments(arg, ARGUMENTS))
    tiny = "tiny" in flags
    c = cifar10.get_config("tiny" if tiny else "cond" if "cond" in flags else "")
    with c.unlocked():
        cifar10.without_augmentation(c)
        if not tiny:
            c.model.fields.augment_dim = 9  # of the released network; zeros are passed
        distil(c, rule, tiny)
        if "blank" in flags:
            classes = c.model.fields.num_classes
            c.data.source, c.data.options = "blank", ConfigDict({"shape": (32, 32, 3), "num_classes": classes})
    return c


def split(given: list[str]) -> tuple[str, set[str]]:
    """The rule, and the other arguments: [] is SiD, ["dmd2", "cond"] a rule and a flag."""
    rules = [part for part in given if part not in ("cond", "blank", "tiny")]
    if len(rules) > 1:
        raise ValueError(f"{' and '.join(rules)} exclude each other; give one rule, with or without cond or blank")
    return rules[0] if rules else "sid", set(given) - set(rules)


def distil(c: ConfigDict, rule: str, tiny: bool, rate: float = 1e-5, batch_size: int = 256) -> None:
    """The settings of SiD's code, or of DMD2 for the rules that follow it."""
    c.method.name = rule
    c.teacher.kind, c.teacher.path = ("fresh", "") if tiny else ("edm", "edm.npz")
    section = c[rule]
    section.score_rate = rate
    c.optim.learning_rate, c.optim.warmup_images, c.optim.decay = rate, 0, "constant"
    c.optim.options = ConfigDict({"b1": 0.0, "b2": 0.999})
    c.diffusion.cond_dropout = 0.0
    c.model.fields.dropout = 0.0
    c.sample.solver, c.sample.timestamps, c.sample.final_denoise, c.sample.afs = "euler", 1, True, False
    section.sigma_sampler = "polynomial"
    if rule in ("dmd2", "f_distill"):
        section.sigma_options = ConfigDict({"sigma_min": 0.002, "sigma_max": 80.0})
        section.score_updates, section.gan = 5, 1e-3
        c.sample.sigma_max = 80.0
        images, batch_size = 2048 * 20_000, 2048
    else:  # the lowest 80 % of the grid from 80 to 0.002
        section.sigma_options = ConfigDict({"sigma_min": 0.002, "sigma_max": 24.4})
        section.score_levels = "noise"
        c.sample.sigma_max = 2.5
        images = 200 * cifar10.MILLION
    if tiny:
        return
    c.ema.options = ConfigDict({"images": 0.5 * cifar10.MILLION, "ramp": 0.05})
    c.data.batch_size = batch_size
    c.train.steps = images // batch_size
    c.train.log_every, c.train.sample_every, c.train.save_every = 100, 2000, 2000
