"""Training: one loop for every method, sharded, checkpointed and interruptible; and loading runs for sampling."""

from jaxdiff.training.build import Run, build, check_sampling, load_data
from jaxdiff.training.curriculum import stages
from jaxdiff.training.evaluate import compare_halves, evaluate, save_reference_stats
from jaxdiff.training.loading import SavedRun, load
from jaxdiff.training.own_runs import open_teacher, save_teacher
from jaxdiff.training.sampling import Sampler, captions_of, from_dataset, from_examples, from_prompts
from jaxdiff.training.state import NonFinite
from jaxdiff.training.trainer import Result, prepare, train

__all__ = [
    "NonFinite",
    "Result",
    "Run",
    "Sampler",
    "SavedRun",
    "build",
    "captions_of",
    "check_sampling",
    "compare_halves",
    "evaluate",
    "from_dataset",
    "from_examples",
    "from_prompts",
    "load",
    "load_data",
    "open_teacher",
    "prepare",
    "save_reference_stats",
    "save_teacher",
    "stages",
    "train",
]
