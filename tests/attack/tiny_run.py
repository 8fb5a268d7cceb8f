"""The config of the runs that are attacked: points in the plane, a network of one layer, a checkpoint per step."""

from training_runs import config_of

ARGUMENTS = {"sharded": "one of two processes holds half of the parameters"}
CHANGES = {
    "train.steps": 10,
    "train.save_every": 1,
    "train.eval_every": 3,
    "train.sample_every": 0,
    "checkpoint.keep": 2,
    "sample.count": 0,
    "eval.samples": 16,
    "eval.reference": 16,
}
SHARDED = {"mesh.data": 1, "mesh.fsdp": 2, "mesh.min_size": 64, "train.eval_every": 0}


def get_config(arg=""):
    config = config_of(changes={**CHANGES, **(SHARDED if arg == "sharded" else {})})
    config.lock()
    return config
