"""Recipes: how the config of a teacher's run becomes that of a student, in place.

    recipe(config, argument)        for --config=METHOD:ARGUMENT --config.teacher.path=RUN

`config` is a copy of the teacher's, so network, convention, data, noise levels and evaluation are inherited; a recipe
sets the method, its section, how it is sampled and how it is optimized. A method's row in METHODS names its recipe.
"""

from __future__ import annotations

from collections.abc import Sequence

from ml_collections import ConfigDict

from jaxdiff import models

FINE = 0.006  # where SFD's grid ends


def student(config: ConfigDict, name: str, *, share: float, rate: float) -> None:
    """What students have in common: a share of the teacher's steps at a learning rate that falls to zero."""
    config.method.name = name
    optimize(config, max(1, round(share * config.train.steps)))
    config.optim.learning_rate, config.optim.warmup_images = rate, 0


def optimize(config: ConfigDict, steps: int) -> None:
    """Train for `steps`: the learning rate, the log and the checkpoints follow."""
    config.train.steps = steps
    config.train.log_every = max(1, steps // 20)
    config.train.save_every = max(1, steps // 2)
    config.optim.decay, config.optim.decay_images = "cosine", config.data.batch_size * steps


def counts(argument: str, default: Sequence[int]) -> tuple[int, ...]:
    """The numbers of evaluations in 4, 2,3,5 or 2-5, ascending."""
    found: set[int] = set()
    for part in argument.split(",") if argument else ():
        first, _, last = part.strip().partition("-")
        last = last or first
        if not (first.isdigit() and last.isdigit()) or not 1 <= int(first) <= int(last):
            raise ValueError(
                f"the argument is the student's numbers of evaluations, such as 4, 2,3 or 2-5, got {argument!r}"
            )
        found |= set(range(int(first), int(last) + 1))
    return tuple(sorted(found)) or tuple(default)


def no_argument(name: str, argument: str) -> None:
    """Refuse an argument of a method that takes none."""
    if argument:
        raise ValueError(f"{name} takes no argument, got {argument!r}: a one-step generator has 1 evaluation")


def learn_guidance(config: ConfigDict, section: str) -> None:
    """The student learns the guided teacher, so it is not guided again."""
    config[section].guidance, config.sample.guidance = config.sample.guidance, 1.0


def one_step(config: ConfigDict) -> None:
    """One step from a noise level that hides the data: ten times their standard deviation."""
    c = config.sample
    c.solver, c.options, c.timestamps = "euler", ConfigDict(), 1
    c.final_denoise, c.afs = True, False
    c.sigma_max = min(c.sigma_max, 10 * config.denoiser.sigma_data)


def few_steps(config: ConfigDict, argument: str) -> None:
    """One step, or the steps of `renoise` down to a level that leaves the last one some work."""
    nfe = counts(argument, (1,))
    if len(nfe) > 1:
        raise ValueError(f"a student is trained for one number of steps, got {argument}")
    one_step(config)
    if nfe[0] > 1:
        c = config.sample
        c.solver, c.timestamps, c.grid = "renoise", nfe[0], "polynomial"
        c.sigma_min = max(c.sigma_min, config.denoiser.sigma_data)


# ------------------------------------------------------------------------------------------ methods


def sfd(config: ConfigDict, argument: str = "") -> None:
    """ARGUMENT: the student's evaluations, such as 4 or 2-5; of an SFD student, those of a second stage."""
    if config.method.name == "sfd":
        _second_stage(config, counts(argument, (1,)))
        return
    conditioned = "step_embed" in models.find(config.model.name).__dataclass_fields__
    nfe = counts(argument, (2, 3, 4, 5) if conditioned else (2,))
    student(config, "sfd", share=1 / 16, rate=1e-3)
    config.sfd.nfe, config.sfd.substeps, config.sfd.solver = nfe, 3, "dpmpp2m"
    if len(nfe) > 1:
        config.model.fields.step_embed = "zero"
    learn_guidance(config, "sfd")
    c = config.sample
    c.solver, c.options, c.final_denoise, c.afs = "euler", ConfigDict(), False, True
    c.sigma_min = max(c.sigma_min, FINE)
    c.timestamps = max(nfe) + 2


def _second_stage(config: ConfigDict, nfe: tuple[int, ...]) -> None:
    """The teacher's steps are Euler steps on a grid that it was trained for: (m + afs) K = its evaluations + afs."""
    c, afs = config.sfd, int(config.sample.afs)
    if c.condition != "steps":
        raise ValueError(f"a student with sfd.condition={c.condition!r} cannot be a teacher; train one with 'steps'")
    if len(nfe) != 1:
        raise ValueError(f"a second stage has one number of evaluations, got {', '.join(map(str, nfe))}")
    walks = [n for n in sorted(c.nfe, reverse=True) if (n + afs) % (nfe[0] + afs) == 0 and n > nfe[0]]
    if not walks:
        possible = [m for m in range(1, max(c.nfe)) if any((n + afs) % (m + afs) == 0 and n > m for n in c.nfe)]
        raise ValueError(
            f"this teacher takes {', '.join(map(str, c.nfe))} evaluations, which {nfe[0]} cannot follow in whole "
            f"steps; choose {' or '.join(map(str, possible)) or 'another teacher'}"
        )
    steps = config.train.steps
    student(config, "sfd", share=1.0, rate=config.optim.learning_rate)
    optimize(config, max(1, round(2.5 * steps)))
    c.substeps, c.solver, c.solver_options = (walks[0] + afs) // (nfe[0] + afs), "euler", ConfigDict()
    c.teacher_afs = bool(afs)
    c.teacher_step = walks[0] + 1 + afs if config.model.fields.get("step_embed", "") else 0
    c.nfe, c.guidance, config.sample.timestamps = nfe, 1.0, nfe[0] + 1 + afs


def emd(config: ConfigDict, argument: str = "") -> None:
    """A one-step generator; no argument."""
    no_argument("emd", argument)
    _score(config, "emd", rate=3e-4)
    config.emd.steps = 4
    one_step(config)


def diff_instruct(config: ConfigDict, argument: str = "") -> None:
    """ARGUMENT: the student's steps, 1 by default."""
    _score(config, "diff_instruct", rate=3e-4)
    few_steps(config, argument)


def sid(config: ConfigDict, argument: str = "") -> None:
    """ARGUMENT: the student's steps, 1 by default. alpha = 1: short runs start far from the end."""
    _score(config, "sid", rate=3e-4)
    config.sid.alpha = 1.0
    few_steps(config, argument)


def dmd2(config: ConfigDict, argument: str = "") -> None:
    """ARGUMENT: the student's steps, 1 by default."""
    _score(config, "dmd2", rate=3e-4)
    few_steps(config, argument)


def f_distill(config: ConfigDict, argument: str = "") -> None:
    """ARGUMENT: the student's steps, 1 by default."""
    _score(config, "f_distill", rate=3e-4)
    few_steps(config, argument)


def uni_instruct(config: ConfigDict, argument: str = "") -> None:
    """ARGUMENT: the student's steps, 1 by default."""
    _score(config, "uni_instruct", rate=3e-4)
    config.uni_instruct.alpha = 1.0
    few_steps(config, argument)


def _score(config: ConfigDict, name: str, *, rate: float) -> None:
    """What score distillations share: three updates of the student score per update, levels above the teacher's."""
    student(config, name, share=0.15, rate=rate)
    config.teacher.fields = ConfigDict(config.model.fields.to_dict())  # model.fields may then become smaller
    c = config[name]
    c.score_updates, c.score_rate = 3, 1e-3
    if config.denoiser.kind == "edm" and config.noise.sigma_sampler == "lognormal":
        c.score_levels = "noise"
        c.sigma_sampler, c.sigma_options = "lognormal", ConfigDict({"mean": config.noise.mean + 0.8, "std": 1.2})
    config.optim.name, config.optim.options = "adam", ConfigDict({"b1": 0.0, "b2": 0.99})
    learn_guidance(config, name)


def consistency(config: ConfigDict, argument: str = "") -> None:
    """ARGUMENT: evaluations per sample, 2 by default; the model takes any number."""
    c = config.consistency
    c.sigma_min, c.sigma_max, c.rho = config.sample.sigma_min, config.sample.sigma_max, config.sample.rho
    c.first = c.last = 18
    _ends(config, "consistency", argument)


def _flow_map(config: ConfigDict, name: str, argument: str, nfe: int) -> int:
    """A student of a flow map method at half the teacher's learning rate; returns the evaluations per sample."""
    found = counts(argument, (nfe,))
    if len(found) > 1:
        raise ValueError(f"{name} takes any number of evaluations: give one to begin with, got {argument}")
    student(config, name, share=0.25, rate=config.optim.learning_rate / 2)
    config[name].distil = True
    learn_guidance(config, name)
    return found[0]


def _ends(config: ConfigDict, name: str, argument: str) -> None:
    """Sampled by jumps to the end, with fresh noise in between."""
    sample, nfe = config.sample, _flow_map(config, name, argument, 2)
    sample.solver, sample.options, sample.grid = "renoise", ConfigDict(), "polynomial"
    sample.final_denoise, sample.afs = True, False
    sample.timestamps, sample.sigma_min = nfe, max(sample.sigma_min, 0.8)
    if name != "consistency":  # whose draws of noise levels cover its range
        sample.sigma_max = min(sample.sigma_max, 10 * config.denoiser.sigma_data)


def _take_tau(config: ConfigDict, name: str) -> None:
    """The network takes the second noise level as a condition."""
    if "scalars" not in models.find(config.model.name).__dataclass_fields__:
        raise ValueError(
            f"{name} needs a network that takes a second noise level: one with a field scalars, which "
            f"{config.model.name!r} does not have; choose another method, or a student network of the library"
        )
    config.model.fields.scalars = ("tau",)


def _jumps(config: ConfigDict, name: str, argument: str) -> None:
    """Sampled by jumps along the grid, from a noise level that hides the data; the network takes tau."""
    c, sample, nfe = config[name], config.sample, _flow_map(config, name, argument, 1)
    c.sigma_min, c.sigma_max = sample.sigma_min, sample.sigma_max
    _take_tau(config, name)
    one_step(config)
    sample.final_denoise, sample.timestamps = False, nfe + 1


def meanflow(config: ConfigDict, argument: str = "") -> None:
    """ARGUMENT: evaluations per sample, 1 by default; the model takes any number."""
    _jumps(config, "meanflow", argument)


def shortcut(config: ConfigDict, argument: str = "") -> None:
    """ARGUMENT: evaluations per sample, 1 by default; the model takes any number."""
    _jumps(config, "shortcut", argument)
    config.shortcut.diagonal = 0.25  # the teacher's weights have it from the start


def trajectory(config: ConfigDict, argument: str = "") -> None:
    """ARGUMENT: evaluations per sample, 1 by default; the model takes any number."""
    _jumps(config, "trajectory", argument)


def scm(config: ConfigDict, argument: str = "") -> None:
    """ARGUMENT: evaluations per sample, 2 by default; the model takes any number."""
    config.scm.sigma_min, config.scm.sigma_max = config.sample.sigma_min, config.sample.sigma_max
    _ends(config, "scm", argument)
    config.scm.warmup = config.train.steps // 4


def facm(config: ConfigDict, argument: str = "") -> None:
    """ARGUMENT: evaluations per sample, 2 by default; the model takes any number."""
    config.facm.sigma_min, config.facm.sigma_max = config.sample.sigma_min, config.sample.sigma_max
    _take_tau(config, "facm")
    _ends(config, "facm", argument)
