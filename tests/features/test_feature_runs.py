"""Features of runs whose networks take more than a class: control metadata, the step of a few-step student, tau."""

import pytest
import training_runs
from training_runs import MEANFLOW, SFD, config_of

from jaxdiff.cli import main
from jaxdiff.training import train

BASE = training_runs.IMAGES
QUICK = {"train.steps": 1, "sample.count": 0, "compile_cache": ""}
FIELDS = {"patch": 4, "depth": 1, "width": 16, "heads": 2, "learn_variance": False}
RUNS = {
    "control": {
        "data.options": {"control": ("crop", "flip", "aspect", "original_size"), "flip": True},
        "model.fields": {**FIELDS, "control": {"alpha": 2.0}},
        "diffusion.control_dropout": 0.1,
    },
    "student": {**SFD, "teacher.kind": "fresh"},
    "flow map": MEANFLOW,
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "flow map")) for name in RUNS])
def test_features_of_a_run_with_more_conditions(name, tmp_path, capsys):
    train(config_of(BASE, {**QUICK, **RUNS[name]}), tmp_path / "run", quiet=True)
    assert main(["features", "catalog", f"--workdir={tmp_path}/run"]) == 0
    assert "blocks_0/out" in capsys.readouterr().out
    score = ["features", "score", f"--workdir={tmp_path}/run", "--select=blocks_0/out", "--sigmas=0.2"]
    assert main([*score, "--metric=nsr", "--count=16", f"--out={tmp_path}/scores.csv"]) == 0
    assert (tmp_path / "scores.csv").read_text().count("\n") == 2
