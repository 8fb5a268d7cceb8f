"""Training: one loop for every method, sharded, checkpointed, stoppable."""

from jaxdiff.training.build import Job, build
from jaxdiff.training.evaluate import evaluate, sample
from jaxdiff.training.trainer import NonFinite, Result, train

__all__ = ["Job", "NonFinite", "Result", "build", "evaluate", "sample", "train"]
