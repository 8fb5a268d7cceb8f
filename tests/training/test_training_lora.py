"""LoRA through the trainer: what is trained and held, resuming, sharding, the merged export, full rank."""

import shutil

import jax
import numpy as np
import pytest
from training_runs import (
    FLOW_MAPS,
    assert_close,
    assert_same_bits,
    config_of,
    images_of,
    losses,
    methods,
    points_of,
    saved_state,
)

import jaxdiff
from jaxdiff.models.low_rank import Adapters
from jaxdiff.training import export, parameters, prepare, train
from jaxdiff.training.state import declare
from jaxdiff.trees import by_name, size_of

ONE = jax.devices()[:1]
RANK = 2
LORA = {"lora.rank": RANK, "lora.alpha": 1.0, "train.steps": 4, "train.save_every": 2, "optim.warmup_images": 0}


def write_run(folder, base):
    """What a finished run leaves, its parameters drawn; and these."""
    config = config_of(base)
    run, _ = prepare(config, ONE)
    shapes = parameters.shapes_of(run.model, run.conditions, run.data.shape)
    rng = np.random.default_rng(5)
    params = jax.tree.map(lambda s: (0.2 * rng.normal(size=s.shape)).astype(np.float32), shapes)
    folder.mkdir(parents=True, exist_ok=True)
    export.write_config(folder, config)
    export.write(folder, params)
    return params


@pytest.fixture(scope="module")
def points(tmp_path_factory):
    """The folder of a run on points, and its parameters."""
    folder = tmp_path_factory.mktemp("points")
    return folder, write_run(folder, points_of("diffusion"))


def config_on(folder, method, changes=None, base_of=points_of):
    """A LoRA run of a method on the run in `folder`: as its teacher, or as what it starts from."""
    source = {"teacher.kind": "run", "teacher.path": str(folder)}
    if method == "diffusion":
        source = {"train.init_from": str(folder)}
    if method in FLOW_MAPS:
        source |= {f"{method}.distil": True}
    if method == "meanflow":
        source |= {"meanflow.cond_dropout": 0.0}  # without a teacher
    return config_of(base_of(method), {**source, **LORA, **(changes or {})})


@methods("consistency")
def test_only_adapters_are_trained_and_the_export_is_merged(points, tmp_path, method):
    folder, base = points
    gone, workdir = tmp_path / "gone", tmp_path / "run"
    shutil.copytree(folder, gone)
    config = config_on(gone, method, {"teacher.offload": method in ("diffusion", "sfd")})
    state = train(config, workdir, quiet=True, devices=ONE).state
    name = "base" if method == "diffusion" else "teacher"
    assert set(state.frozen) == {name}
    assert_same_bits(jax.device_get(state.frozen[name]), base)
    student = state.params["student"]
    others = ("head", "ratio", "weight")  # a classifier, its running means; scm's weights of noise levels
    networks = {key: tree for key, tree in {**state.params, **state.averages}.items() if key not in others}
    assert "student" in networks
    for adapters in networks.values():
        assert isinstance(adapters, Adapters) and adapters.base == name and adapters.scale == 1 / RANK
        assert set(by_name(adapters)) == set(by_name(student))
    # two moments of each factor, and counters: nothing of the base
    assert size_of(state.opt_state) <= 2 * size_of(state.params) + 8 * len(state.params)
    assert size_of(student.low) < size_of(base) / 2
    assert all(np.abs(factor).max() > 0 for factor in jax.tree.leaves(student.low))  # both factors have moved
    new = set(by_name(student.full))  # of an SFD student, the embedding of its steps; of a flow map, that of tau
    assert all(path.startswith(("step/", "scalar_tau/")) for path in new)
    assert bool(new) == (method in {"sfd", *FLOW_MAPS} - {"scm"})

    arrays = export.read_arrays(workdir)
    chosen = by_name(state.averages.get("ema", student).low)
    assert set(arrays) == set(by_name(base)) | new
    for path, kernel in by_name(base).items():
        if f"{path}/a" in chosen:
            update = np.asarray(chosen[f"{path}/a"]) @ np.asarray(chosen[f"{path}/b"])
            np.testing.assert_allclose(arrays[path], kernel + update / RANK, atol=1e-6)
            assert np.abs(arrays[path] - kernel).max() > 0
        else:
            np.testing.assert_array_equal(arrays[path], kernel)
    saved = jaxdiff.load(workdir, devices=ONE)
    assert_same_bits(by_name(jax.device_get(saved.params)), arrays)
    # stopped after two steps and resumed, without the base's folder
    shutil.rmtree(workdir / "checkpoints/4")
    shutil.rmtree(gone)
    assert_same_bits(train(config, workdir, quiet=True, devices=ONE).state, state)


@pytest.mark.parametrize("method", ["diffusion", pytest.param("emd", marks=pytest.mark.slow)])
def test_meshes_agree_with_one_device(tmp_path, method):
    fields = {"model.fields.scan": True, "model.remat": "full", "optim.clip": 0.0}
    folder = tmp_path / "teacher"
    write_run(folder, {**images_of("diffusion"), **fields})
    changes = {**fields, "lora.rank": 4, "train.steps": 2, "sample.count": 0, "emd.score_updates": 1}
    one = train(config_on(folder, method, changes, images_of), tmp_path / "one", quiet=True, devices=ONE)
    mesh = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}
    many = train(config_on(folder, method, {**changes, **mesh}, images_of), tmp_path / "many", quiet=True)
    np.testing.assert_allclose([*losses(tmp_path / "many").values()], [*losses(tmp_path / "one").values()], rtol=1e-5)
    assert_close(many.state.averages, one.state.averages, 2e-5)
    kernel = many.state.frozen["base" if method == "diffusion" else "teacher"]["blocks"]["block"]["mlp"]["in"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (1, 16, 64)  # of [1, 32, 128]: fsdp, tensor
    factor = many.state.params["student"].low["blocks"]["block"]["mlp"]["in"]["kernel"].b
    assert factor.shape == (1, 4, 128) and factor.addressable_shards[0].data.shape == (1, 4, 64)
    config = config_on(folder, method, changes, images_of)
    assert_same_bits(saved_state(tmp_path / "many", 2, config), many.state)


def test_at_full_rank_the_first_update_is_that_of_all_kernels(points, tmp_path):
    folder, base = points
    changes = {
        "train.steps": 1,
        "optim.name": "sgd",
        "optim.learning_rate": 0.1,
        "optim.clip": 0.0,
        "ema.kind": "constant",
    }
    changes |= {"ema.options": {"decay": 0.0}, "lora.alpha": 0.0}
    found = config_on(folder, "diffusion", {**changes, "lora.rank": 1000})
    train(found, tmp_path / "low", quiet=True, devices=ONE)
    train(config_on(folder, "diffusion", {**changes, "lora.rank": 0}), tmp_path / "full", quiet=True, devices=ONE)
    low, full = export.read_arrays(tmp_path / "low"), export.read_arrays(tmp_path / "full")
    kernels = [path for path in low if path.endswith("kernel")]
    for path in kernels:
        np.testing.assert_allclose(low[path], full[path], atol=1e-6)
    assert max(np.abs(full[path] - by_name(base)[path]).max() for path in kernels) > 1e-3


def test_the_state_is_as_small_as_stated(points):
    """Moments and gradients are of rank (in + out) elements for a kernel of in x out."""
    folder, base = points
    run, mesh = prepare(config_on(folder, "sfd"), ONE)
    declared = declare(run, mesh)
    low = declared.params["student"].low
    wanted = 0
    for path, kernel in by_name(base).items():
        if path.endswith("kernel"):
            wanted += min(RANK, *kernel.shape) * sum(kernel.shape)
    assert size_of(low) == wanted


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train.init_from": ""}, "lora.rank > 0 updates a trained network"),
        ({"lora.rank": -1}, r"lora.rank must be in \[0, "),
        ({"lora.targets": "("}, "not a regular expression"),
        ({"ema.widths": (0.05,), "ema.snapshot_every": 2}, "ema.widths"),
        (
            {"model.name": "edm2", "model.fields": {}, "data.source": "digits", "data.options": {}},
            "normalizes its kernels",
        ),
    ],
)
def test_mistakes(points, changes, message):
    with pytest.raises(ValueError, match=message):
        prepare(config_on(points[0], "diffusion", changes), ONE)


def test_targets_that_match_nothing_are_rejected_before_training(points, tmp_path):
    with pytest.raises(ValueError, match="matches none of the network's"):
        train(
            config_on(points[0], "diffusion", {"lora.targets": "attention"}), tmp_path / "run", quiet=True, devices=ONE
        )
    assert not (tmp_path / "run").exists()
