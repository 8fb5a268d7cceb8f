"""Training: one loop for every method, sharded, checkpointed, stoppable."""

from jaxdiff.training.build import Job, build
from jaxdiff.training.evaluate import compare_halves, evaluate, sample, sampler
from jaxdiff.training.trainer import NonFinite, Result, train

__all__ = ["Job", "NonFinite", "Result", "build", "compare_halves", "evaluate", "sample", "sampler", "train"]
