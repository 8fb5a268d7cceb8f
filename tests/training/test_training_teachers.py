"""A distillation's teacher: where it comes from, that the student starts as it, and that it is needed only once."""

import math
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_runs import assert_same_bits, config_of, images_of, points_of, saved_state

from jaxdiff import models, weights
from jaxdiff.cli import main
from jaxdiff.conditions import Conditions
from jaxdiff.training import evaluate, export, load, parameters, prepare, trainer
from jaxdiff.training.state import read_frozen
from jaxdiff.trees import by_name

ONE = jax.devices()[:1]


def train(changes, workdir, base=None):
    return trainer.train(config_of(base or points_of("sfd"), changes), workdir, quiet=True, devices=ONE)


def random_params(shapes):
    rng = np.random.default_rng(5)
    spread = lambda s: 1 / np.sqrt(max(1, math.prod(s.shape[:-1])))  # noqa: E731
    return jax.tree.map(lambda s: (spread(s) * rng.normal(size=s.shape)).astype(np.float32), shapes)


def write_run(folder, base, changes=None):
    """What a finished run leaves, its parameters drawn; and these."""
    config = config_of(base, changes)
    run, _ = prepare(config, ONE)
    params = random_params(parameters.shapes_of(run.model, run.conditions, run.data.shape))
    folder.mkdir(parents=True, exist_ok=True)
    trainer.write_records(folder, run)
    export.write(folder, params)
    return params


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """The folder of a run on points, and its parameters."""
    folder = tmp_path_factory.mktemp("teacher")
    return folder, write_run(folder, points_of("diffusion"))


@pytest.fixture(scope="module")
def student(teacher, tmp_path_factory):
    """A student of two steps whose teacher is gone since."""
    gone, workdir = tmp_path_factory.mktemp("gone") / "teacher", tmp_path_factory.mktemp("student")
    shutil.copytree(teacher[0], gone)
    changes = {"teacher.kind": "run", "teacher.path": str(gone), "train.steps": 2, "optim.warmup_images": 0}
    train(changes, workdir)
    shutil.rmtree(gone)
    return workdir, changes


def same(found, wanted):
    """All of `wanted` is in `found`, to the bit."""
    have = dict(jax.tree_util.tree_leaves_with_path(found))
    for path, leaf in jax.tree_util.tree_leaves_with_path(wanted):
        np.testing.assert_array_equal(np.asarray(have[path]), np.asarray(leaf), err_msg=jax.tree_util.keystr(path))


def moved(found, wanted):
    have = dict(jax.tree_util.tree_leaves_with_path(found))
    leaves = jax.tree_util.tree_leaves_with_path(wanted)
    return max(float(np.abs(np.asarray(have[path]) - np.asarray(leaf)).max()) for path, leaf in leaves)


# ------------------------------------------------------------------------------------------ runs as teachers


def test_the_student_starts_as_the_run_and_leaves_it_alone(teacher, student, tmp_path):
    folder, params = teacher
    workdir, changes = student
    started = train({**changes, "teacher.path": str(folder), "optim.learning_rate": 0.0, "train.steps": 1}, tmp_path)
    same(started.state.params["student"], params)
    assert np.abs(started.state.params["student"]["step"]["out"]["kernel"]).max() == 0
    state = saved_state(workdir, 2, config_of(points_of("sfd"), changes))
    same(state.frozen["teacher"], params)
    assert 1e-3 < moved(state.params["student"], params) < 0.1  # at most 4 Adam updates of 1e-3, and a little
    assert "step" not in state.frozen["teacher"]


def test_a_run_goes_on_without_its_teacher(teacher, student, tmp_path, capsys):
    workdir = shutil.copytree(student[0], tmp_path / "again")
    config = config_of(points_of("sfd"), {**student[1], "train.steps": 3})
    result = trainer.train(config, workdir, devices=ONE)
    assert result.step == 3 and "resuming from the checkpoint of step 2" in capsys.readouterr().out
    same(result.state.frozen["teacher"], teacher[1])
    shutil.rmtree(workdir / "checkpoints")  # from the start, it is needed
    with pytest.raises(FileNotFoundError, match="no teacher at"):
        trainer.train(config, workdir, quiet=True, devices=ONE)


def test_a_second_stage_starts_as_the_student_it_is_given(student, tmp_path):
    """Including its step conditioning; steps that student was not trained for are rejected."""
    stage = {"sfd.nfe": (1,), "sample.timestamps": 3, "sfd.solver": "euler", "sfd.teacher_afs": True}
    path = {"teacher.kind": "run", "teacher.path": str(student[0]), "optim.learning_rate": 0.0, "train.steps": 1}
    for wrong, message in [
        ({"sfd.substeps": 3, "sfd.teacher_step": 7}, r"5 evaluations, not one of \(1, 2\)"),
        ({"sfd.substeps": 1, "sfd.teacher_step": 3, "sample.sigma_max": 40.0}, "sample.sigma_max=40.0, not 80.0"),
        ({"sfd.substeps": 1, "sfd.teacher_step": 3, "sfd.teacher_afs": False}, "sfd.teacher_afs=False, not True"),
        ({"sfd.substeps": 1, "sfd.teacher_step": 3, "sfd.solver": "heun"}, "sfd.solver='heun', not 'euler'"),
    ]:
        with pytest.raises(ValueError, match=r"student that was trained for other steps: .*" + message):
            train({**stage, **path, **wrong}, tmp_path / "wrong")
    result = train({**stage, **path, "sfd.substeps": 1, "sfd.teacher_step": 3}, tmp_path / "second")
    exported = load(student[0], devices=ONE).params
    assert np.abs(exported["step"]["out"]["kernel"]).max() > 0
    assert_same_bits(result.state.params["student"], exported)
    assert_same_bits(result.state.frozen["teacher"], exported)


def test_an_exported_file_alone_is_a_run(teacher, tmp_path):
    file = shutil.copy(teacher[0] / "export.safetensors", tmp_path)
    changes = {"teacher.kind": "run", "teacher.path": str(file)}
    same(read_frozen(prepare(config_of(points_of("sfd"), changes), ONE)[0])["teacher"], teacher[1])


@pytest.mark.parametrize(
    ("source", "changes", "error", "message"),
    [
        ("nowhere", {}, FileNotFoundError, r"no teacher at \S*/nowhere: train one.*--config.teacher.path"),
        ("no_export", {}, FileNotFoundError, r"no exported weights at \S*/no_export/export.safetensors"),
        ("no_config", {}, FileNotFoundError, r"no run at \S*/no_config: there is no config.json"),
        ("teacher", {"model.fields.width": 24}, ValueError, r"must have the teacher's architecture: model field width is 24 here and 16 in \S*teacher"),
        ("teacher", {"model.fields.depth": 2}, ValueError, r"model field depth is 2 here and 1 in"),
        ("teacher", {"denoiser.kind": "flow"}, ValueError, r"was trained as EDM\(sigma_data=0.5\).*Flow"),
        ("teacher", {"denoiser.sigma_data": 1.0}, ValueError, r"EDM\(sigma_data=0.5\).*EDM\(sigma_data=1.0\)"),
        ("teacher", {"sfd.teacher_step": 7, "sfd.nfe": (1,), "sfd.substeps": 3, "sample.timestamps": 3}, ValueError, r"teacher \S+ has no step conditioning; set it to 0"),
        ("student", {}, ValueError, r"step conditioning: set model.fields.step_embed='zero' and sfd.teacher_step"),
        ("student", {"model.fields.step_embed": "", "sfd.nfe": (1,), "sample.timestamps": 3}, ValueError, r"step conditioning: set model.fields.step_embed='zero'"),
    ],
)  # fmt: skip
def test_a_teacher_that_does_not_fit_leaves_no_folder(teacher, student, tmp_path, source, changes, error, message):
    for name, file in [("no_export", "config.json"), ("no_config", "export.safetensors")]:
        (tmp_path / name).mkdir()
        shutil.copy(teacher[0] / file, tmp_path / name)
    folder = {"teacher": teacher[0], "student": student[0]}.get(source, tmp_path / source)
    with pytest.raises(error, match=message):
        train({"teacher.kind": "run", "teacher.path": str(folder), **changes}, tmp_path / "run")
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------------------------------ sampling without it


def test_sampling_needs_three_files(student, tmp_path, capsys):
    workdir = tmp_path / "moved"
    workdir.mkdir()
    for name in ("config.json", "data.json", "export.safetensors"):
        shutil.copy(student[0] / name, workdir)
    drawn = {}
    for nfe in (1, 2, 0):
        out = tmp_path / f"{nfe}.npz"
        assert main(["sample", f"--workdir={workdir}", f"--nfe={nfe}", "--count=5", f"--out={out}"]) == 0
        assert f"wrote 5 samples to {out}: euler, {nfe or 2} evaluations each" in capsys.readouterr().out
        drawn[nfe] = np.load(out)["images"]
    assert drawn[1].shape == (5, 2) and np.isfinite(drawn[1]).all()
    np.testing.assert_array_equal(drawn[0], drawn[2])
    assert np.abs(drawn[1] - drawn[2]).max() > 1e-3

    before = sorted(tmp_path.iterdir())
    assert main(["sample", f"--workdir={workdir}", "--nfe=9", f"--out={tmp_path}/9.npz"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("jaxdiff sample: this student is trained for 1, 2 evaluations") and said.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


# ------------------------------------------------------------------------------------------ public weights

UNET = {"resolution": 8, "width": 8, "channel_mult": (1,), "blocks": 1, "attention": ()}
VIT = {"patch": 2, "depth": 2, "width": 32, "heads": 4, "learn_variance": False}


def write_public(path, kind, model):
    x, cond = jnp.zeros((1, 8, 8, model.channels)), Conditions.of_model(model).example(1)
    params = random_params(jax.eval_shape(lambda: model.init(jax.random.key(0), x, jnp.zeros(1), cond))["params"])
    weights.save(model, params, kind, path)
    return params


def public_run(path, kind, fields, name, convention=""):
    changes = {"model.name": name, "model.fields": {**fields, "step_embed": "zero"}}
    changes["denoiser.kind"] = convention or {"edm": "edm", "dit": "ddpm"}[kind]
    base = {k: v for k, v in images_of("sfd").items() if not k.startswith("model.")}
    return prepare(config_of(base, {**changes, "teacher.kind": kind, "teacher.path": str(path)}), ONE)[0]


def test_the_student_starts_as_the_weights_of_a_file(tmp_path):
    path = tmp_path / "edm.npz"
    params = write_public(path, "edm", models.UNet(**UNET, channels=1, num_classes=10))
    run = public_run(path, "edm", UNET, "unet")
    frozen = read_frozen(run)
    shapes = {"teacher": run.method.frozen["teacher"].shapes()}
    assert jax.tree.map(jnp.shape, frozen) == jax.tree.map(jnp.shape, shapes)
    state = jax.jit(run.method.init)(jax.random.key(0), run.select(run.data.take(0, 1)), frozen)
    same(state.params["student"], params)
    same(state.frozen["teacher"], params)
    extra = [name for name in by_name(state.params["student"]) if "step" in name]
    total = len(jax.tree.leaves(state.params["student"]))
    assert len(extra) == total - len(jax.tree.leaves(params)) == 4 + 2 * 5  # two dense layers; five blocks

    wider = public_run(path, "edm", {**UNET, "width": 16}, "unet")
    with pytest.raises(ValueError, match=r"edm.npz \(UNet\) does not match model.fields: \d+ mismatches \(.*expected"):
        read_frozen(wider)
    with pytest.raises(FileNotFoundError, match=re.escape(f"no weights at {tmp_path / 'none.npz'}")):
        read_frozen(public_run(tmp_path / "none.npz", "edm", UNET, "unet"))


@pytest.mark.parametrize("scan", [False, True])
def test_files_that_do_not_tell_all_are_read_as_the_student_is(tmp_path, scan):
    """The heads of an unpublished DiT, and the layout of its blocks."""
    path = tmp_path / "dit.npz"
    params = write_public(path, "dit", models.DiT(**VIT, channels=1, num_classes=10, scan=scan))
    run = public_run(path, "dit", {**VIT, "scan": scan}, "dit")
    same(read_frozen(run)["teacher"], params)
    shapes = run.method.frozen["teacher"].shapes()
    assert jax.tree.structure(read_frozen(run)["teacher"]) == jax.tree.structure(shapes)


def test_weights_of_another_convention_are_refused(tmp_path):
    path = tmp_path / "dit.npz"
    write_public(path, "dit", models.DiT(**VIT, channels=1, num_classes=10))
    with pytest.raises(ValueError, match=r"dit.npz .*DDPM\(schedule='linear'.*EDM"):
        read_frozen(public_run(path, "dit", VIT, "dit", "edm"))


def test_a_run_with_another_layout_of_blocks_is_refused_by_name(tmp_path):
    write_run(tmp_path / "teacher", images_of("diffusion"))
    changes = {"teacher.kind": "run", "teacher.path": str(tmp_path / "teacher"), "model.fields.scan": True}
    run, _ = prepare(config_of(images_of("sfd"), changes), ONE)
    with pytest.raises(ValueError, match=r"model field scan is True here and False in"):
        read_frozen(run)


def test_a_blank_data_set_trains_but_cannot_be_evaluated():
    changes = {"data.source": "blank", "data.options": {"shape": (8, 8, 1), "num_classes": 10}}
    run, mesh = prepare(config_of(images_of("sfd"), changes), ONE)
    assert run.model.num_classes == 10
    with pytest.raises(ValueError, match=r"data.source='blank' has no images"):
        evaluate(run, None, mesh)
