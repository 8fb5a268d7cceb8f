"""Control and padded texts from a config: what reaches the networks in training and sampling, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from training_runs import IMAGES, assert_close, assert_same_bits, config_of, losses

from jaxdiff.conventions import EDM
from jaxdiff.methods import Method, exported
from jaxdiff.models import conditioning
from jaxdiff.models.padding import padding
from jaxdiff.training import Sampler, prepare, train
from jaxdiff.training.padding import padded
from jaxdiff.training.state import declare

RECORDED = ("original_size", "crop", "flip", "aspect")
VIT = {"patch": 4, "depth": 2, "width": 16, "heads": 2}
FIELDS = {
    "dit": {**VIT, "learn_variance": False},
    "mdt": {**VIT, "depth": 3, "decoder": 1, "learn_variance": False},
    "pixart": {**VIT, "learn_variance": False},
    "mmdit": VIT,
    "latent_unet": {"width": 16, "channel_mult": (1,), "blocks": 1, "depths": (1,), "heads": 2, "groups": 2},
    "unet": {"resolution": 8, "width": 16, "channel_mult": (1,), "blocks": 1, "attention": ()},
}
CONTROLLED = {"data.options": {"control": RECORDED, "flip": True}, "diffusion.control_dropout": 0.1}
MESH = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}


def config_with(name="dit", changes=None, **control):
    fields = {**FIELDS[name], "control": {"alpha": 2.0, **control}}
    return config_of(IMAGES, {**CONTROLLED, "model.name": name, "model.fields": fields, **(changes or {})})


@pytest.mark.parametrize(
    "name", [name if name in ("dit", "latent_unet") else pytest.param(name, marks=pytest.mark.slow) for name in FIELDS]
)
def test_every_network_takes_class_and_control_from_one_config(name):
    mesh = {**MESH, "mesh.data": 4, "mesh.tensor": 1} if name == "unet" else MESH  # its attention has one head
    run, where = prepare(config_with(name, mesh))
    assert run.model.control.convention == EDM(0.5) and run.model.control.alpha == 2.0
    assert run.conditions.null("semantic") == {"label": 10}
    assert run.conditions.null("control") == dict.fromkeys(run.model.control.keys, conditioning.UNKNOWN)
    declared = declare(run, where)
    for part in ("high_in", "low_in"):
        assert declared.params["student"]["control_embed"][part]["kernel"].sharding.spec == PartitionSpec("fsdp", None)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FIELDS, "prompts"])
def test_every_network_takes_a_step(name, tmp_path):
    texts = {"text": np.ones((4, 3, 5), np.float32), "text_mask": np.ones((4, 3), bool)}
    config = config_of(IMAGES, prompts(tmp_path, **texts)) if name == "prompts" else config_with(name)
    run, mesh = prepare(config, jax.devices()[:1])
    state = declare(run, mesh)
    batch = run.select(run.data.batch(0, 16))
    after, metrics = jax.eval_shape(run.method.step, state, batch, jax.random.key(0))
    assert "loss" in metrics and jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)


GUIDED = {
    "sample.guidance": 2.0,
    "sample.control_guidance": 0.5,
    "diffusion.control_dropout": 0.5,
    "optim.warmup_images": 0,
}


def test_samples_are_conditioned_as_configured():
    control = {"sample.control.flip": 1, "sample.control.original_size": (20, 30)}
    run, _ = prepare(config_with(changes={**GUIDED, **control}), jax.devices()[:1])
    assert run.nfe == 3 * 5  # heun on three timestamps, each evaluation threefold
    found = {key: value.tolist() for key, value in run.control.items()}
    assert found == {"crop": [0, 0], "flip": [1], "aspect": [1.5], "original_size": [20, 30]}


@pytest.mark.slow
def test_a_run_trains_and_samples_with_control_guided_apart():
    run, mesh = prepare(config_with(changes=GUIDED), jax.devices()[:1])
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), declare(run, mesh))
    shapes = state.params["student"]
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * 0.3, jnp.float32), shapes)
    before = params["control_embed"]
    state = state.replace(params={"student": params}, averages={"ema": params})
    state, metrics = jax.jit(run.method.step)(state, run.select(run.data.batch(0, 16)), jax.random.key(0))
    assert np.isfinite(metrics["loss"])
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), state.params["student"]["control_embed"], before)
    assert all(value > 0 for value in jax.tree.leaves(moved)), moved  # also what stands for no control
    images, _ = Sampler(run, mesh).sample(exported(state), 2, 0)
    assert images.shape == (2, 8, 8, 1) and np.isfinite(images).all()


def test_data_may_record_more_than_a_network_takes():
    run, _ = prepare(config_with(keys=("flip",)))
    batch = run.select(run.data.batch(0, 16))
    assert set(batch) == {"image", "label", "flip"} and set(np.unique(batch["flip"])) == {0, 1}
    without = config_of(IMAGES, {**CONTROLLED, "diffusion.control_dropout": 0.0, "model.fields": FIELDS["dit"]})
    run, _ = prepare(without)
    assert set(run.select(run.data.batch(0, 16))) == {"image", "label"}


def test_texts_are_padded_anew_at_every_step_and_alike_in_samples():
    keep = Method(None, lambda state, batch, key: batch, lambda params, noise, cond, key: cond, None)
    text = jax.random.normal(jax.random.key(0), (3, 6, 4))
    batch = {"text": text, "text_mask": jnp.arange(6) < jnp.array([[2], [4], [6]])}
    method = padded(keep, jax.jit(padding("noisy", 0.5)))
    steps = [method.step(None, batch, jax.random.key(seed)) for seed in (0, 0, 1)]
    drawn = [method.sample(None, jnp.zeros((3, 1)), batch, None), method.sample(None, jnp.zeros((3, 1)), batch, None)]
    for out in (*steps, *drawn):
        assert set(out) == {"text"}
        np.testing.assert_array_equal(out["text"][2], text[2])
        assert np.abs(out["text"][:2] - text[:2]).max() > 0.1
    np.testing.assert_array_equal(steps[0]["text"], steps[1]["text"])
    assert np.abs(steps[0]["text"] - steps[2]["text"]).max() > 0.1
    np.testing.assert_array_equal(drawn[0]["text"], drawn[1]["text"])
    alone = method.sample(None, jnp.zeros((1, 1)), jax.tree.map(lambda a: a[1:2], batch), None)
    np.testing.assert_allclose(alone["text"], drawn[0]["text"][1:2], atol=1e-6)  # whatever the batch


def prompts(folder, **tables):
    for name, table in tables.items():
        np.save(folder / f"{name}.npy", table)
    fields = {**FIELDS["pixart"], "text_dim": 5}
    return {"data.source": "prompts", "data.options": {"path": str(folder), "shape": (8, 8, 4)},
            "model.name": "pixart", "model.fields": fields, "cond.padding": "replicate"}  # fmt: skip


def test_a_config_pads_the_texts_of_prompts_and_the_empty_one(tmp_path):
    text = np.random.default_rng(0).normal(size=(4, 3, 5)).astype(np.float32)
    mask = np.arange(3) < np.array([[1], [2], [3], [1]])
    run, _ = prepare(config_of(IMAGES, prompts(tmp_path, text=text, text_mask=mask)), jax.devices()[:1])
    null = run.conditions.null("semantic")
    assert set(null) == {"text"} and run.model.num_classes == 0
    np.testing.assert_array_equal(null["text"], text[[3, 3, 3], [0, 0, 0]])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.options": {"control": ("flip",)}}, r"'crop'.*data.options.control.*control.keys"),
        ({"data.options": {}}, r"'crop'.*data.options.control"),
        ({"model.fields": FIELDS["dit"]}, r"control_dropout=0.1 needs .*model.fields.control"),
        ({"diffusion.control_dropout": 0.0, "sample.control_guidance": 0.5}, r"control_guidance=0.5 needs .*control_dropout .*'diffusion' and 0.0"),
        ({"sample.control.original_size": (4,)}, r"original_size takes 2 numbers"),
        ({"model.fields.control": {"alfa": 1.0}}, r"unknown field of control 'alfa' \(did you mean 'alpha'"),
        ({"cond.padding": "noisy"}, r"cond.padding='noisy' .* digits"),
    ],
)  # fmt: skip
def test_a_config_that_is_wrong(changes, message):
    with pytest.raises(ValueError, match=message):
        prepare(config_with(changes=changes))


@pytest.mark.slow
def test_a_run_with_control_goes_on_to_the_same_bits_and_a_mesh_agrees(tmp_path):
    one, changes = jax.devices()[:1], {"train.steps": 3, "train.save_every": 1, "sample.count": 0}
    state = train(config_with(changes=changes), tmp_path / "straight", quiet=True, devices=one).state
    for steps in (2, 3):
        again = train(
            config_with(changes={**changes, "train.steps": steps}), tmp_path / "resumed", quiet=True, devices=one
        )
    assert_same_bits(again.state, state)
    spread = train(config_with(changes={**changes, **MESH}), tmp_path / "spread", quiet=True).state
    found, wanted = losses(tmp_path / "spread"), losses(tmp_path / "straight")
    np.testing.assert_allclose(list(found.values()), list(wanted.values()), rtol=1e-5)
    assert_close(spread.params, state.params, 2e-5)
