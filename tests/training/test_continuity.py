"""A run is resumed as what it was: harmless changes are taken and told, others refused unless they are allowed."""

import json
import re
import shutil

import jax
import numpy as np
import pytest
from image_files import write_images
from training_runs import IMAGES, POINTS, assert_same_bits, config_of, points_of, saved_steps

from jaxdiff.cli import main
from jaxdiff.training import continuity, export, lock, trainer

ONE = jax.devices()[:1]
SHORT = {"train.steps": 3, "sample.count": 0}


def train(changes, workdir, base=POINTS, **how):
    return trainer.train(config_of(base, {**SHORT, **changes}), workdir, devices=ONE, **how)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """A run of three steps."""
    workdir = tmp_path_factory.mktemp("three")
    train({}, workdir, quiet=True)
    return workdir


@pytest.fixture
def run(three, tmp_path):
    return shutil.copytree(three, tmp_path / "run")


def files_of(workdir):
    return {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file() and "tensorboard" not in str(path)}


def history(workdir):
    return json.loads((workdir / continuity.FILE).read_text())


def test_the_config_a_run_began_with_is_recorded(three):
    began = history(three)["began"]
    assert began["seed"] == 0 and began["model.fields.width"] == 16 and began["step"] == 0
    assert re.fullmatch(r"\w{16} of 1,000 examples", began["data fingerprint"]) and began["processes"] == 1
    assert history(three)["changes"] == [] and not (three / lock.FILE).exists()


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"seed": 1}, "seed: 0 -> 1"),
        ({"optim.learning_rate": 0.01}, "optim.learning_rate: 0.001 -> 0.01"),
        ({"optim.options": {"b2": 0.9}}, "optim.options.b2: unset -> 0.9"),
        ({"diffusion.weight": "min_snr"}, 'diffusion.weight: "edm" -> "min_snr"'),
        ({"data.options.count": 999}, "data.options.count: 1000 -> 999"),
        ({"data.batch_size": 4}, "data.batch_size: 8 -> 4"),
        ({"noise.mean": -1.0}, "noise.mean: -1.2 -> -1.0"),
    ],
)
def test_a_change_that_alters_the_result_is_refused(run, changes, shown):
    before = files_of(run)
    with pytest.raises(continuity.ConfigChanged) as caught:
        train({**changes, "train.steps": 6}, run, quiet=True)
    message = str(caught.value)
    assert f"the run in {run} is at step 3" in message and f"\n  {shown}\n" in message
    assert "--allow_config_change" in message and "train.steps" not in message
    assert files_of(run) == before


def test_harmless_changes_are_taken_and_told(run, capsys):
    changes = {"train.steps": 5, "train.save_every": 2, "checkpoint.keep": 9, "sample.timestamps": 4, "sfd.substeps": 9}
    assert train(changes, run).step == 5
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("changed since step 3")]
    assert "without effect on the result so far" in line and "train.steps: 3 -> 5" in line
    assert "checkpoint.keep: 3 -> 9" in line
    (entry,) = history(run)["changes"]
    assert entry["step"] == 3 and entry["changed"]["train.save_every"] == [3, 2]
    assert history(run)["began"]["train.steps"] == 3 and history(run)["now"]["train.steps"] == 5
    assert train(changes, run).step == 5 and len(history(run)["changes"]) == 1  # the same again is no change


def test_changes_that_are_allowed(run, capsys):
    assert train({"seed": 7, "train.steps": 4}, run, allow_config_change=True).step == 4
    assert "by --allow_config_change, the result is a mixture: seed: 0 -> 7" in capsys.readouterr().out
    assert history(run)["changes"][0]["changed"]["seed"] == [0, 7]
    assert train({"seed": 7, "train.steps": 5}, run, quiet=True).step == 5  # now it is the run's own
    with pytest.raises(continuity.ConfigChanged, match="seed: 7 -> 0"):
        train({"train.steps": 6}, run, quiet=True)


def test_a_config_edited_by_hand_is_a_change(run):
    """`jaxdiff train --workdir` reads config.json, which is not what the run is compared with."""
    path = run / "config.json"
    record = json.loads(path.read_text())
    record.pop("checksum", None)
    path.write_text(json.dumps({**record, "seed": 3}))
    with pytest.raises(continuity.ConfigChanged, match="seed: 0 -> 3"):
        trainer.train(export.read_config(run), run, quiet=True, devices=ONE)


def test_the_command_line(run, capsys):
    def command(*more):
        return main(["train", f"--workdir={run}", *more])

    assert command("--config.train.steps=4", "--config.seed=1") == 2
    assert "  seed: 0 -> 1\n" in capsys.readouterr().err
    assert command("--config.train.steps=4") == 0
    assert saved_steps(run)[-1] == 4
    assert command("--config.train.steps=5", "--config.seed=1", "--allow_config_change") == 0
    assert command("--config.train.steps=6") == 0  # the stored config has the new seed


def test_an_image_that_is_added_changes_the_order(tmp_path):
    write_images(tmp_path / "photos", [(8, 8)] * 8)
    options = {"path": str(tmp_path / "photos"), "channels": 1, "image_size": 8}
    changes = {"data.source": "folder", "data.options": options, "data.batch_size": 4}
    train(changes, tmp_path / "run", IMAGES, quiet=True)
    moved = shutil.copytree(tmp_path / "photos", tmp_path / "moved")
    elsewhere = {**changes, "data.options": {**options, "path": str(moved)}, "train.steps": 4}
    assert train(elsewhere, tmp_path / "run", IMAGES, quiet=True).step == 4  # the same images elsewhere
    write_images(tmp_path / "more", [(8, 8)])
    shutil.copy(next((tmp_path / "more").iterdir()), moved / "zz.png")
    with pytest.raises(continuity.ConfigChanged, match=r"data fingerprint: \"\w+ of 8 examples\" -> \"\w+ of 9 ex"):
        train({**elsewhere, "train.steps": 5}, tmp_path / "run", IMAGES, quiet=True)


def test_other_devices_change_the_last_bits_and_sometimes_more():
    old = {"processes": 2, "devices that split the batch": 4, "mesh.fsdp": 2, "noise.assignment": "none"}
    new = {**old, "processes": 1, "devices that split the batch": 1, "mesh.fsdp": 1}
    full = continuity.flat(config_of())
    found = continuity.compare({**full, **old}, {**full, **new})
    assert {change.name: change.effect for change in found} == dict.fromkeys(
        ("processes", "devices that split the batch", "mesh.fsdp"), "rounding"
    )
    grouped = {"noise.assignment": "hungarian", "noise.assignment_options.groups": 0}
    found = continuity.compare({**full, **old, **grouped}, {**full, **new, **grouped})
    assert {c.name for c in found if c.effect == "result"} == {"devices that split the batch"}


@pytest.mark.parametrize(
    ("method", "name", "effect"),
    [
        ("diffusion", "sample.sigma_max", "none"),
        ("sfd", "sample.sigma_max", "result"),
        ("sfd", "sample.count", "none"),
        ("sfd", "sfd.substeps", "result"),
        ("emd", "sfd.substeps", "none"),
        ("sfd", "sample.control.crop", "result"),
        ("sfd", "teacher.kind", "result"),
        ("sfd", "eval.samples", "none"),
    ],
)
def test_what_a_field_does_depends_on_the_method(method, name, effect):
    record = continuity.flat(config_of(points_of(method)))
    assert name in record and continuity.effect(name, record, record) == effect


def test_every_field_of_the_config_is_judged(three):
    """What is not known to be harmless is refused: a new field is on the safe side."""
    record = continuity.flat(config_of())
    assert continuity.effect("some.new_field", record, record) == "result"
    assert set(continuity.HARMLESS) <= set(record) | {"compile_cache"}


def test_a_run_without_a_history_is_compared_with_its_config(run):
    (run / continuity.FILE).unlink()
    with pytest.raises(continuity.ConfigChanged, match="seed: 0 -> 1"):
        train({"seed": 1}, run, quiet=True)
    assert train({"train.steps": 4}, run, quiet=True).step == 4
    assert history(run)["began"]["train.steps"] == 3


def test_a_history_that_cannot_be_read(run):
    (run / continuity.FILE).write_text('{"format": 1')
    with pytest.raises(ValueError, match=r"history.json cannot be read .*move the file away"):
        train({"train.steps": 4}, run, quiet=True)


def test_a_finished_stage_of_a_curriculum_is_compared_too(tmp_path):
    from ml_collections import ConfigDict

    def staged(width):
        config = config_of(POINTS, SHORT)
        stages = {"a": {"optim": {"clip": width}}, "b": {"train": {"steps": 2}}}
        with config.unlocked():
            config.curriculum = ConfigDict(stages)
        return config

    first = trainer.train(staged(1.0), tmp_path, quiet=True, devices=ONE)
    with pytest.raises(continuity.ConfigChanged, match=r"optim.clip: 1.0 -> 2.0"):
        trainer.train(staged(2.0), tmp_path, quiet=True, devices=ONE)
    again = trainer.train(staged(1.0), tmp_path, quiet=True, devices=ONE)
    assert_same_bits(jax.device_get(again.state), jax.device_get(first.state))


def test_a_second_run_in_the_same_workdir_is_refused(run):
    held = lock.acquire(run)
    before = files_of(run)
    try:
        with pytest.raises(lock.Locked, match="another run is training in"):
            train({"train.steps": 6}, run, quiet=True)
        assert files_of(run) == before
    finally:
        held.release()
    result = train({"train.steps": 4}, run, quiet=True)
    assert result.step == 4 and np.isfinite(jax.tree.leaves(result.state.params)[0]).all()
