"""Training: one loop for every method, sharded, checkpointed, stoppable."""

from jaxdiff.training.build import Job, build, check_sampling
from jaxdiff.training.curriculum import stages
from jaxdiff.training.evaluate import captions, compare_halves, corrector, evaluate, sample, sampler
from jaxdiff.training.trainer import NonFinite, Result, train

__all__ = [
    "Job",
    "NonFinite",
    "Result",
    "build",
    "captions",
    "check_sampling",
    "compare_halves",
    "corrector",
    "evaluate",
    "sample",
    "sampler",
    "stages",
    "train",
]
