"""Configs of students that inherit from their teacher's run."""

import json

import pytest
from ml_collections import ConfigDict

from jaxdiff.cli import configs
from jaxdiff.cli.flags import UsageError
from jaxdiff.cli.train import COMMAND
from jaxdiff.configs import digits, digits_sfd
from jaxdiff.methods import METHODS
from jaxdiff.training import build, export, inherit, load_data


def run_at(folder, config):
    """A workdir as training begins it: enough to inherit from."""
    folder.mkdir()
    export.write_config(folder, config)
    return folder


@pytest.fixture
def teacher(tmp_path):
    return run_at(tmp_path / "teacher", digits.get_config("tiny"))


def student(path, method, argument=""):
    return inherit.student_config(inherit.run_config(path), method, argument, "run", str(path))


@pytest.mark.parametrize("method", inherit.recipes())
def test_every_recipe_gives_a_config_that_builds(teacher, method):
    config = student(teacher, method)
    trained = digits.get_config("tiny")
    assert config.method.name == method
    assert config.teacher.path == str(teacher)
    assert config.data.to_dict() == trained.data.to_dict()
    assert config.eval.to_dict() == trained.eval.to_dict()
    assert build(config, load_data(config)).nfe >= 1


def test_the_command_line_reads_the_rows_that_have_recipes():
    assert configs.recipes() == inherit.recipes()
    assert "diffusion" not in configs.recipes()
    assert set(configs.recipes()) <= set(METHODS)


@pytest.mark.parametrize(("argument", "nfe"), [("4", (4,)), ("2,3", (2, 3)), ("2-5", (2, 3, 4, 5)), ("", (2, 3, 4, 5))])
def test_sfd_takes_its_evaluations(teacher, argument, nfe):
    config = student(teacher, "sfd", argument)
    assert tuple(config.sfd.nfe) == nfe
    assert config.sample.timestamps == max(nfe) + 2
    assert config.model.fields.get("step_embed", "") == ("zero" if len(nfe) > 1 else "")


def test_a_second_stage_finds_the_teachers_walk(tmp_path):
    first = digits_sfd.get_config()
    config = student(run_at(tmp_path / "few", first), "sfd", "1")
    by_hand = digits_sfd.get_config("second")
    assert config.sfd.to_dict() == by_hand.sfd.to_dict()
    assert config.sample.to_dict() == by_hand.sample.to_dict()


def test_a_second_stage_that_does_not_fit_names_those_that_do(tmp_path):
    few = run_at(tmp_path / "few", digits_sfd.get_config())
    with pytest.raises(ValueError, match="1 or 2"):
        student(few, "sfd", "3")


def test_a_students_run_is_not_a_teacher_of_other_methods(tmp_path):
    few = run_at(tmp_path / "few", digits_sfd.get_config())
    with pytest.raises(ValueError, match="runs/digits"):
        student(few, "emd")


def test_guidance_is_learnt(tmp_path):
    guided = digits.get_config("tiny")
    guided.sample.guidance = 2.0
    folder = run_at(tmp_path / "guided", guided)
    for method in ("sfd", "emd", "consistency"):
        config = student(folder, method)
        assert (config[method].guidance, config.sample.guidance) == (2.0, 1.0)


def resolve(*overrides, config="sfd:2"):
    from jaxdiff.cli.flags import parse

    given = parse("train", COMMAND, [f"--config={config}", *(f"--config.{text}" for text in overrides)])
    return configs.resolve(COMMAND, given)


def test_overrides_come_after_the_recipe(teacher):
    config = resolve(f"teacher.path={teacher}", "train.steps=7", "sfd.substeps=2")
    assert (config.train.steps, config.sfd.substeps) == (7, 2)
    assert config.optim.decay_images == 7 * config.data.batch_size


def test_missing_teachers_are_named(tmp_path):
    with pytest.raises(UsageError, match="--config=sfd:2"):
        resolve()
    with pytest.raises(FileNotFoundError, match="does not exist"):
        resolve(f"teacher.path={tmp_path / 'none'}")
    (tmp_path / "weights.npz").touch()
    with pytest.raises(FileNotFoundError, match="is a file"):
        resolve(f"teacher.path={tmp_path / 'weights.npz'}")
    with pytest.raises(ValueError, match="2-5"):
        resolve(f"teacher.path={run_at(tmp_path / 't', digits.get_config('tiny'))}", config="sfd:two")


def test_a_run_with_stages_names_a_folder(tmp_path):
    staged = digits.get_config("tiny")
    with staged.unlocked():
        staged.curriculum = ConfigDict({"small": {}, "large": {}})
    with pytest.raises(ValueError, match="large"):
        student(run_at(tmp_path / "staged", staged), "sfd")


def test_config_json_is_what_is_inherited(teacher):
    record = json.loads((teacher / "config.json").read_text())
    record["model"]["fields"]["width"] = 12
    del record["checksum"]  # an edit that is meant
    (teacher / "config.json").write_text(json.dumps(record))
    assert student(teacher, "emd").model.fields.width == 12
