"""Students of score distillation that are not their teacher's network, and configs that their methods refuse."""

import shutil

import jax
import numpy as np
import pytest
from test_training_teachers import same, write_run
from training_runs import config_of, points_of

import jaxdiff
from jaxdiff.training import build, inherit, load_data, prepare, trainer
from jaxdiff.training.state import declare, read_frozen

ONE = jax.devices()[:1]
SMALL = {"model.fields.width": 8, "train.steps": 2, "train.save_every": 1, "sample.count": 4}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher")
    return folder, write_run(folder, points_of("diffusion"))


def test_a_student_smaller_than_its_teacher_is_trained_and_sampled_without_it(teacher, tmp_path, capsys):
    """Its score has the teacher's network and weights; resumed to the bit; only the student is exported."""
    folder = shutil.copytree(teacher[0], tmp_path / "gone")
    large = {"width": 16, "depth": 1}
    changes = {**SMALL, "teacher.kind": "run", "teacher.path": str(folder), "teacher.fields": large}
    base = points_of("dmd2")
    first = trainer.train(config_of(base, {**changes, "train.steps": 1}), tmp_path / "run", devices=ONE)
    out = capsys.readouterr().out
    assert "is not its teacher's, so it starts untrained; train.init_from" in out
    same(first.state.frozen["teacher"], teacher[1])
    shapes = {name: first.state.params[name]["in"]["kernel"].shape for name in ("student", "score")}
    assert shapes == {"student": (2, 8), "score": (2, 16)}
    step = np.abs(np.asarray(first.state.params["score"]["in"]["kernel"]) - teacher[1]["in"]["kernel"]).max()
    assert 0 < step < 0.01  # two updates from the teacher's weights
    shutil.rmtree(folder)
    trainer.train(config_of(base, changes), tmp_path / "run", quiet=True, devices=ONE)
    loaded = jaxdiff.load(tmp_path / "run", devices=ONE)
    assert loaded.params["in"]["kernel"].shape == (2, 8)
    assert loaded.sample(0, 5).shape == (5, 2)


def test_a_recipe_keeps_the_teachers_fields_beside_the_students(teacher):
    """So that --config.model.fields.width=8 is enough for a smaller student."""
    config = inherit.student_config(inherit.run_config(teacher[0]), "sid", "", "run", str(teacher[0]))
    run = build(config, load_data(config))
    assert run.method.notes == () and config.teacher.fields.to_dict() == config.model.fields.to_dict()
    with config.unlocked():
        config.model.fields.width = 8
    run, mesh = prepare(config, ONE)
    declared = declare(run, mesh)
    assert len(run.method.notes) == 1
    assert declared.params["student"]["in"]["kernel"].shape == (2, 8)
    assert declared.params["score"]["in"]["kernel"].shape == declared.frozen["teacher"]["in"]["kernel"].shape == (2, 16)
    same(read_frozen(run)["teacher"], teacher[1])
    with config.unlocked():
        config.sid.score_network = "student"
    assert declare(*prepare(config, ONE)).params["score"]["in"]["kernel"].shape == (2, 8)


@pytest.mark.parametrize("method", ["diff_instruct", "dmd2"])
def test_the_argument_of_a_recipe_is_the_number_of_steps(teacher, method):
    trained = inherit.run_config(teacher[0])
    config = inherit.student_config(trained, method, "4", "run", str(teacher[0]))
    assert (config.sample.solver, config.sample.timestamps) == ("renoise", 4)
    assert build(config, load_data(config)).nfe == 4
    with pytest.raises(ValueError, match="one number of steps, got 2-4"):
        inherit.student_config(trained, method, "2-4", "run", str(teacher[0]))


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("dmd2", {"data.source": "blank", "data.options": {"shape": (2,)}}, r"'dmd2' trains on real images.*'blank'.*sid"),
        ("sid", {"sample.solver": "heun"}, "sample.solver='euler', sample.timestamps=1, or sample.solver='renoise'"),
        ("emd", {"sample.solver": "renoise", "sample.timestamps": 2}, "a one-step generator takes one step"),
        ("f_distill", {"sample.guidance": 2.0}, "would guide it twice"),
        ("dmd2", {"dmd2.head_on": "teacher"}, "which has no network; set it to 'score'"),
    ],
)  # fmt: skip
def test_configs_that_do_not_fit_are_refused(method, changes, message):
    with pytest.raises(ValueError, match=message):
        prepare(config_of(points_of(method), changes), ONE)
