"""Training: one loop for every method, sharded, checkpointed, stoppable."""

from jaxdiff.training.build import Job, build, check_sampling
from jaxdiff.training.evaluate import compare_halves, corrector, evaluate, sample, sampler
from jaxdiff.training.trainer import NonFinite, Result, train

__all__ = [
    "Job",
    "NonFinite",
    "Result",
    "build",
    "check_sampling",
    "compare_halves",
    "corrector",
    "evaluate",
    "sample",
    "sampler",
    "train",
]
