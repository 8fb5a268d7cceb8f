"""A workdir by itself: sampled without data, teacher or mesh; of an earlier format; never spoilt by a refused command."""

import shutil
import tarfile
from pathlib import Path

import jax
import numpy as np
import pytest
from image_files import write_images
from paths import GOLDEN
from training_runs import IMAGES, POINTS, SFD, assert_same_bits, config_of, saved_state

import jaxdiff
from jaxdiff import models, weights
from jaxdiff.cli import main
from jaxdiff.conditions import Conditions
from jaxdiff.training import export, formats, load, train
from jaxdiff.training.checkpoint import CheckpointError
from jaxdiff.trees import by_name

ONE = jax.devices()[:1]
QUICK = {"train.steps": 2, "train.save_every": 2, "sample.count": 0, "sample.batch_size": 4, "compile_cache": ""}


def copied(workdir, target):
    """What a user copies to another machine: no checkpoints, no logs."""
    target.mkdir()
    for path in workdir.iterdir():
        if path.suffix in (".json", ".npz", ".safetensors"):
            shutil.copy(path, target)
    return target


# ------------------------------------------------------------------------------------------ without the data


def test_a_folder_of_images_is_needed_to_train_and_not_to_sample(tmp_path, capsys):
    folder = tmp_path / "photos"
    for name in ("cats", "dogs"):
        write_images(folder / name, [(8, 8)] * 4)
    options = {"path": str(folder), "image_size": 8, "channels": 1}
    changes = {**QUICK, "data.source": "folder", "data.options": options, "data.batch_size": 8, "eval.samples": 8}
    train(config_of(IMAGES, changes), tmp_path / "run", quiet=True, devices=ONE)
    before = jaxdiff.load(tmp_path / "run", devices=ONE).sample(3, 4, label=1)
    shutil.rmtree(folder)
    moved = copied(tmp_path / "run", tmp_path / "moved")
    saved = jaxdiff.load(moved, devices=ONE)
    assert saved.run.data.class_names == ("cats", "dogs") and saved.run.data.num_classes == 2
    np.testing.assert_array_equal(saved.sample(3, 4, label=1), before)
    assert main(["sample", f"--workdir={moved}", "--count=2", f"--out={tmp_path}/a.png"]) == 0
    assert main(["evaluate", f"--workdir={moved}"]) == 2
    assert str(folder) in capsys.readouterr().err  # what it looked for
    assert main(["features", "catalog", f"--workdir={moved}"]) == 0


@pytest.mark.parametrize("kind", ["captions", "prompts"])
def test_text_runs_are_sampled_without_their_files(kind, tmp_path):
    """Prompts embedded by hashing can be any; of stored embeddings those of the first examples are kept."""
    fields = {"patch": 2, "depth": 2, "width": 16, "heads": 2, "pooled_dim": 0}
    changes = {**QUICK, "model.name": "mmdit", "model.fields": fields, "data.batch_size": 4}
    if kind == "captions":
        changes |= {"data.source": "shapes", "data.options": {"count": 8, "size": 8, "caption_text": (12, 8)}}
    else:
        rng = np.random.default_rng(0)
        np.save(tmp_path / "text.npy", rng.normal(size=(7, 5, 8)).astype(np.float32))
        changes |= {"data.source": "prompts", "data.options": {"path": str(tmp_path), "shape": (8, 8, 3)}}
    train(config_of(IMAGES, changes), tmp_path / "run", quiet=True, devices=ONE)
    before = jaxdiff.load(tmp_path / "run", devices=ONE).sample(0, 5)
    (tmp_path / "text.npy").unlink(missing_ok=True)
    saved = jaxdiff.load(copied(tmp_path / "run", tmp_path / "moved"), devices=ONE)
    np.testing.assert_array_equal(saved.sample(0, 5), before)
    if kind == "captions":
        images = saved.sample(0, 2, prompt=["a red circle left of a blue square", "anything"])
        assert np.isfinite(images).all()
    else:
        with pytest.raises(ValueError, match="prompts need a text encoder"):
            saved.sample(0, 2, prompt="anything")


def test_reference_statistics_stand_in_for_the_data(tmp_path, capsys):
    quick = {**QUICK, "eval.net": "digits", "eval.samples": 24, "eval.reference": 64}
    train(config_of(IMAGES, quick), tmp_path / "run", quiet=True, devices=ONE)
    stats = tmp_path / "digits.npz"
    assert main(["evaluate", f"--workdir={tmp_path}/run", f"--save_reference_stats={stats}"]) == 0
    assert main(["evaluate", f"--workdir={tmp_path}/run"]) == 0
    whole = capsys.readouterr().out
    moved = copied(tmp_path / "run", tmp_path / "moved")
    assert main(["evaluate", f"--workdir={moved}", f"--reference_stats={stats}"]) == 0
    alone = capsys.readouterr().out
    line = next(line for line in whole.splitlines() if line.startswith("frechet_digits"))
    assert line in alone and "recall" not in alone  # moments give the Fréchet distance alone


# ------------------------------------------------------------------------------------------ on other devices


def test_a_run_of_eight_devices_is_sampled_on_one_two_and_eight(tmp_path):
    changes = {**QUICK, "mesh.data": 1, "mesh.fsdp": 8, "mesh.min_size": 64}
    train(config_of(IMAGES, changes), tmp_path, quiet=True)
    images = {}
    for count in (1, 2, 8):
        saved = load(tmp_path, devices=jax.devices()[:count])
        images[count] = saved.sample(5, 6, label="cycle")
        kernel = saved.params["blocks_0"]["mlp"]["in"]["kernel"]
        assert len(kernel.sharding.device_set) == count
        assert kernel.addressable_shards[0].data.shape == ((32, 16) if count == 8 else (32, 128))
    np.testing.assert_allclose(images[2], images[1], atol=1e-5)
    np.testing.assert_allclose(images[8], images[1], atol=1e-5)


# ------------------------------------------------------------------------------------------ an earlier format


@pytest.fixture
def first(tmp_path):
    """A run of two steps as the first format stored it."""
    with tarfile.open(GOLDEN / "workdir_format1.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "run", np.load(GOLDEN / "workdir_format1.npz")


def test_a_workdir_of_the_first_format_is_sampled(first, tmp_path):
    workdir, golden = first
    config = export.read_config(workdir)
    assert config.method.name == "diffusion" and config.diffusion.cond_dropout == 0.1
    assert config.sample.timestamps == 4 and config.optim.accum_steps == 2
    assert main(["sample", f"--workdir={workdir}", "--count=4", f"--out={tmp_path}/a.npz"]) == 0
    found = np.load(tmp_path / "a.npz")
    np.testing.assert_allclose(found["images"], golden["images"], atol=1e-4)
    np.testing.assert_array_equal(found["labels"], golden["labels"])


def test_a_workdir_of_the_first_format_is_resumed(first):
    workdir, golden = first
    config = export.read_config(workdir)
    with config.unlocked():
        config.train.steps = 4
    result = train(config, workdir, quiet=True, devices=ONE)
    found = by_name(result.state.averages["ema"])
    for name in golden.files:
        if name.startswith("after/"):
            np.testing.assert_allclose(found[name.removeprefix("after/")], golden[name], atol=2e-5, err_msg=name)
    assert int(saved_state(workdir, 4, config).step) == 4  # stored in the present format


def test_fields_of_the_first_format_go_to_their_methods():
    """The weight of EMD's student score, the levels of consistency models, half steps."""
    old = {"method": {"name": "emd"}, "noise": {"weight": "eps"}, "emd": {"half": True, "step_eps": 0.2, "step_z": 0.1}}
    found = formats.current({**old, "emd": {**old["emd"], "step_x": 0.0, "levels": "uniform"}}, Path("config.json"))
    steps = {"step_eps": 0.1, "step_z": 0.05, "step_x": 0.0}
    assert (
        found["emd"] == {**steps, "sigma_sampler": "uniform", "score_weight": "eps"} and "weight" not in found["noise"]
    )
    old = {"method": {"name": "consistency"}, "noise": {"mean": -1.0, "std": 2.0}, "model": {"fields": {"remat": True}}}
    found = formats.current(old, Path("config.json"))
    assert found["consistency"] == {"mean": -1.0, "std": 2.0} and found["model"]["remat"] == "full"


def test_a_workdir_of_a_later_format_is_refused(first):
    path = first[0] / "config.json"
    path.write_text(path.read_text().replace("{", '{"format": 9,', 1))
    with pytest.raises(ValueError, match="format 9"):
        export.read_config(first[0])


# ------------------------------------------------------------------------------------------ refused commands


def test_a_refused_command_leaves_the_run_as_it_was(tmp_path):
    """A forgotten override does not fit the checkpoint: nothing of the run is overwritten, and it resumes."""
    wide = config_of(POINTS, {**QUICK, "model.fields.width": 24})
    train(wide, tmp_path, quiet=True, devices=ONE)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with pytest.raises(CheckpointError, match="another model or method"):
        train(config_of(POINTS, {**QUICK, "train.steps": 3}), tmp_path, quiet=True, devices=ONE)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == files
    config = export.read_config(tmp_path)
    assert config.model.fields.width == 24
    with config.unlocked():
        config.train.steps = 3
    assert train(config, tmp_path, quiet=True, devices=ONE).step == 3


# ------------------------------------------------------------------------------------------ conventions

SMALL = {"width": 8, "channel_mult": (1,), "blocks": 1, "depths": (1,), "mid_depth": 1, "heads": 2, "groups": 4}
TEXT = {"text": (3, 5, 10), "pooled": (3, 1280)}


def write_prompts(folder, names):
    rng = np.random.default_rng(0)
    for name in names:
        np.save(folder / f"{name}.npy", rng.normal(size=TEXT[name]).astype(np.float32))
    return {"data.source": "prompts", "data.options": {"path": str(folder), "shape": (8, 8, 4)}, "data.batch_size": 4}


def write_public(path, kind, model):
    cond = {name: np.zeros(signal.batch_shape(1), signal.dtype) for name, signal in model.signals().items()}
    params = jax.jit(model.init)(jax.random.key(0), np.zeros((1, 8, 8, 4)), np.zeros(1), cond)["params"]
    weights.save(model, params, kind, path)
    return params


@pytest.mark.parametrize("where", ["teacher", "init_from"])
@pytest.mark.parametrize(
    ("kind", "denoiser"),
    [
        ("sd_unet", {"kind": "ddpm", "schedule": "linear"}),
        ("sd_unet", {"kind": "edm"}),
        ("dit", {"kind": "edm"}),
        ("dit", {"kind": "ddpm", "schedule": "linear", "prediction": "v"}),
    ],
)
def test_public_weights_of_another_convention_are_refused(kind, denoiser, where, tmp_path):
    if kind == "dit":
        fields = {"patch": 2, "depth": 1, "width": 16, "heads": 2, "learn_variance": False}
        write_public(tmp_path / "w.npz", kind, models.DiT(channels=4, num_classes=10, **fields))
        data = {"data.source": "blank", "data.options": {"shape": (8, 8, 4), "num_classes": 10}}
    else:
        fields = {**SMALL, "text_dim": 10}
        write_public(tmp_path / "w.npz", kind, models.LatentUNet(**fields))
        data = write_prompts(tmp_path, ["text"])
    name = "dit" if kind == "dit" else "latent_unet"
    changes = {**QUICK, **data, "data.batch_size": 4, "model.name": name, "model.fields": fields}
    changes |= {f"denoiser.{key}": value for key, value in denoiser.items()}
    if where == "teacher":
        changes |= {**SFD, "model.fields": {**fields, "step_embed": "zero"}}
        del changes["model.fields.step_embed"]
        changes |= {"teacher.kind": kind, "teacher.path": str(tmp_path / "w.npz")}
    else:
        changes |= {"train.init_from": str(tmp_path / "w.npz"), "train.init_kind": kind}
    with pytest.raises(ValueError, match=r"w\.npz .*was trained as DDPM"):
        train(config_of(IMAGES, changes), tmp_path / "run", quiet=True, devices=ONE)


@pytest.mark.parametrize("where", ["teacher", "init_from"])
def test_a_run_that_predicts_v_is_not_taken_for_one_that_predicts_eps(where, tmp_path):
    ddpm = {**QUICK, "denoiser.kind": "ddpm", "noise.sigma_sampler": "discrete"}
    train(config_of(POINTS, {**ddpm, "denoiser.prediction": "v"}), tmp_path / "v", quiet=True, devices=ONE)
    changes = {**ddpm, "train.init_from": str(tmp_path / "v")}
    if where == "teacher":
        changes = {**ddpm, **SFD, "teacher.kind": "run", "teacher.path": str(tmp_path / "v")}
    with pytest.raises(ValueError, match=r"prediction='v'.*prediction='eps'"):
        train(config_of(POINTS, changes), tmp_path / "eps", quiet=True, devices=ONE)


def test_a_teacher_of_sdxls_form_is_distilled_and_sampled(tmp_path):
    """Pooled text and six sizes: what prompts do not say of the image comes from the config's `sample.control`."""
    fields = {**SMALL, "text_dim": 10, "pooled_dim": 1280, "sizes": 6, "size_width": 256, "linear": True}
    params = write_public(tmp_path / "sdxl.npz", "sdxl_unet", models.LatentUNet(**fields))
    changes = {**QUICK, **write_prompts(tmp_path, ["text", "pooled"]), **SFD, "model.name": "latent_unet"}
    del changes["model.fields.step_embed"]
    changes |= {"model.fields": {**fields, "step_embed": "zero"}, "sample.control.crop": (2, 3)}
    changes |= {"denoiser.kind": "ddpm", "denoiser.schedule": "sqrt_linear", "optim.learning_rate": 1e-4}
    changes |= {"teacher.kind": "sdxl_unet", "teacher.path": str(tmp_path / "sdxl.npz"), "optim.warmup_images": 0}
    result = train(config_of(IMAGES, changes), tmp_path / "run", quiet=True, devices=ONE)
    assert_same_bits(jax.device_get(result.state.frozen["teacher"]), jax.device_get(params))
    saved = jaxdiff.load(tmp_path / "run", devices=ONE)
    np.testing.assert_array_equal(saved.run.control["sizes"], [64, 64, 2, 3, 64, 64])
    assert set(saved.run.conditions) == {"text", "pooled", "sizes", "step"}
    assert isinstance(saved.run.conditions, Conditions)
    images = saved.sample(0, 3, nfe=2)
    assert images.shape == (3, 8, 8, 4) and np.isfinite(images).all()
