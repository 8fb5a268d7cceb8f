"""Training algorithms, each a module with its equations, its `Options` and `build(options, parts) -> Method`."""

from jaxdiff.methods import averaging, consistency, diffusion, emd, langevin, score_distillation, sfd
from jaxdiff.methods.method import (
    Entry,
    Frozen,
    Method,
    Optimizers,
    Parts,
    Sampling,
    Teacher,
    TrainState,
    exported,
    optimizers,
)

METHODS: dict[str, Entry] = {
    "diffusion": Entry(diffusion.Options, diffusion.build, data=True),
    "consistency": Entry(
        consistency.Options,
        consistency.build,
        teacher=lambda options: options.distil,
        data=True,
        check=consistency.check_sample,
    ),
    "sfd": Entry(
        sfd.Options,
        sfd.build,
        teacher=lambda options: True,
        fixed=("grid", "rho", "sigma_min", "sigma_max", "afs"),
        check=sfd.check_sample,
    ),
    "emd": Entry(
        emd.Options,
        emd.build,
        teacher=lambda options: True,
        fixed=("sigma_max",),
        check=score_distillation.check_sample,
    ),
}

__all__ = [
    "METHODS",
    "Entry",
    "Frozen",
    "Method",
    "Optimizers",
    "Parts",
    "Sampling",
    "Teacher",
    "TrainState",
    "averaging",
    "consistency",
    "diffusion",
    "emd",
    "exported",
    "langevin",
    "optimizers",
    "score_distillation",
    "sfd",
]
