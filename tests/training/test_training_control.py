"""Control and padded texts from a config: what reaches the networks in training and sampling, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from training_runs import PICTURES, assert_close, assert_same_bits, config_of, losses

from jaxdiff.methods import Method
from jaxdiff.models import conditioning
from jaxdiff.training import build, sample, train
from jaxdiff.training.conditions import padded
from jaxdiff.training.evaluate import controls
from jaxdiff.training.trainer import declare

RECORDED = ("original_size", "crop", "flip", "aspect")
VIT = {"patch": 4, "depth": 2, "width": 16, "heads": 2}
FIELDS = {
    "dit": {**VIT, "learn_variance": False},
    "mdt": {**VIT, "depth": 3, "decoder": 1, "learn_variance": False},
    "pixart": {**VIT, "learn_variance": False},
    "mmdit": VIT,
    "latent_unet": {"width": 16, "multipliers": (1,), "blocks": 1, "depths": (1,), "heads": 2, "groups": 2},
    "unet": {"resolution": 8, "width": 16, "multipliers": (1,), "blocks": 1, "attention": ()},
}
TOLD = {"data.options": {"control": RECORDED, "flip": True}, "cond.control_drop": 0.1}
MESH = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}


def config_with(name="dit", changes=None, **control):
    fields = {**FIELDS[name], "control": {"alpha": 2.0, **control}}
    return config_of(PICTURES, {**TOLD, "model.name": name, "model.fields": fields, **(changes or {})})


@pytest.mark.parametrize(
    "name", [name if name in ("dit", "latent_unet") else pytest.param(name, marks=pytest.mark.slow) for name in FIELDS]
)
def test_every_network_takes_class_and_control_from_one_config(name):
    mesh = {**MESH, "mesh.data": 4, "mesh.tensor": 1} if name == "unet" else MESH  # its attention has one head
    job = build(config_with(name, mesh))
    assert job.model.control.time == "edm" and job.model.control.alpha == 2.0
    assert job.null == {"label": 10, "control": conditioning.UNKNOWN}
    declared, _ = declare(job)
    for part in ("high_in", "low_in"):
        assert declared.params["control_embed"][part]["kernel"].sharding.spec == PartitionSpec("fsdp", None)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FIELDS, "prompts"])
def test_every_network_takes_a_step(name, tmp_path):
    texts = {"text": np.ones((4, 3, 5), np.float32), "text_mask": np.ones((4, 3), bool)}
    config = config_of(PICTURES, prompts(tmp_path, **texts)) if name == "prompts" else config_with(name)
    job = build(config, jax.devices()[:1])
    state, _ = declare(job)
    after, metrics = jax.eval_shape(job.method.step, state, job.dataset.batch(0, 16), jax.random.key(0))
    assert "loss" in metrics and jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)


GUIDED = {"sample.guidance": 2.0, "sample.control_guidance": 0.5, "cond.control_drop": 0.5, "optim.warmup_images": 0}


def test_samples_are_told_what_the_config_says():
    told = {"sample.control.flip": 1, "sample.control.original_size": (20, 30)}
    job = build(config_with(changes={**GUIDED, **told}), jax.devices()[:1])
    assert job.nfe == 3 * 5  # heun on three timestamps, each evaluation threefold
    found = {key: np.unique(value, axis=0).tolist() for key, value in controls(job, 2)["control"].items()}
    assert found == {"crop": [[0, 0]], "flip": [[1]], "aspect": [[1.5]], "original_size": [[20, 30]]}


@pytest.mark.slow
def test_a_run_trains_and_samples_with_control_guided_apart():
    job = build(config_with(changes=GUIDED), jax.devices()[:1])
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), declare(job)[0])
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * 0.3, jnp.float32), state.params)
    before = params["control_embed"]
    state, metrics = jax.jit(job.method.step)(
        state.replace(params=params, ema=params), job.dataset.batch(0, 16), jax.random.key(0)
    )
    assert np.isfinite(metrics["loss"])
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), state.params["control_embed"], before)
    assert all(value > 0 for value in jax.tree.leaves(moved)), moved  # also what stands for no control
    ((images, _),) = sample(job, state, 2, seed=0)
    assert images.shape == (2, 8, 8, 1) and np.isfinite(images).all()


def test_data_may_record_more_than_a_network_takes():
    batch = build(config_with(keys=("flip",))).dataset.batch(0, 16)
    assert set(batch["control"]) == {"flip"} and set(np.unique(batch["control"]["flip"])) == {0, 1}
    without = config_of(PICTURES, {**TOLD, "cond.control_drop": 0.0, "model.fields": FIELDS["dit"]})
    assert set(build(without).dataset.batch(0, 16)) == {"image", "label"}


def test_texts_are_padded_anew_at_every_step_and_alike_in_samples():
    keep = Method(None, lambda state, batch, key: batch, lambda state, noise, cond, key: cond, None, None)
    text = jax.random.normal(jax.random.key(0), (3, 6, 4))
    batch = {"text": text, "text_mask": jnp.arange(6) < jnp.array([[2], [4], [6]])}
    method = padded(keep, jax.jit(conditioning.padding("noisy", 0.5)))
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
    job = build(config_of(PICTURES, prompts(tmp_path, text=text, text_mask=mask)), jax.devices()[:1])
    assert set(job.null) == {"text"} and job.model.num_classes == 0
    np.testing.assert_array_equal(job.null["text"], text[[3, 3, 3], [0, 0, 0]])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.options": {"control": ("flip",)}}, r"takes the controls crop, flip, aspect, original_size, the data record flip; set data.options.control=.* or leave crop, aspect, original_size out"),
        ({"data.options": {}}, r"the data record none"),
        ({"model.fields": FIELDS["dit"]}, r"cond.control_drop=0.1 needs a model with model.fields.control"),
        ({"cond.control_drop": 0.0, "sample.control_guidance": 0.5}, r"sample.control_guidance=0.5 needs .* cond.control_drop above 0; got method 'denoise' and 0.0"),
        ({"sample.control.original_size": (4,)}, r"original_size of a sample is 2 numbers, got \(4,\)"),
        ({"model.fields.control": {"alfa": 1.0}}, r"unknown field of control 'alfa' \(did you mean 'alpha'"),
        ({"cond.padding": "noisy"}, r"cond.padding='noisy' fills up texts .* digits has no texts"),
    ],
)  # fmt: skip
def test_a_config_that_is_wrong(changes, message):
    with pytest.raises(ValueError, match=message):
        build(config_with(changes=changes))


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
