"""Representation alignment: its loss in closed form, what it trains, and that runs with it resume to the same bits."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from training_runs import IMAGES, assert_same_bits, config_of, lines

from jaxdiff import autoencoders, methods, models, weights
from jaxdiff.evaluation import feature_net
from jaxdiff.methods import Frozen, alignment
from jaxdiff.methods.diffusion import Options
from jaxdiff.models import DiT, dinov2, low_rank
from jaxdiff.training import export, load_data, prepare, train
from jaxdiff.training.alignment import features_of
from jaxdiff.training.state import declare

ONE = jax.devices()[:1]
ALIGN = {
    "diffusion.align.weight": 0.5,
    "diffusion.align.net": "digits",
    "diffusion.align.tap": "blocks_0/out",
    "diffusion.align.width": 16,
    "sample.count": 0,
    "train.save_every": 2,
}


def test_the_loss_is_minus_the_mean_cosine():
    y = jax.random.normal(jax.random.key(0), (3, 2, 4, 5))
    factors = jnp.arange(1.0, 25).reshape(3, 2, 4, 1)
    assert float(alignment.alignment_loss(factors * y, y)) == pytest.approx(-1, abs=1e-6)
    assert float(alignment.alignment_loss(-y, 7 * y)) == pytest.approx(1, abs=1e-6)
    turned = jnp.array([[[[3.0, 4.0]]]])
    assert float(alignment.alignment_loss(turned, jnp.array([[[[1.0, 0.0]]]]))) == pytest.approx(-0.6, abs=1e-6)
    assert np.isfinite(jax.grad(lambda p: alignment.alignment_loss(p, y))(jnp.zeros_like(y))).all()


def test_features_are_resampled_to_the_grid_of_the_activation():
    y = jnp.arange(4.0).reshape(1, 2, 2, 1)
    np.testing.assert_allclose(alignment.resample(y, (1, 1)).ravel(), [1.5])
    np.testing.assert_allclose(alignment.resample(y[:, :1, :1] + 3, (4, 2)), np.full((1, 4, 2, 1), 3.0))
    wide = alignment.resample(y, (2, 4))[0, :, :, 0]
    np.testing.assert_allclose(wide, [[0, 0.25, 0.75, 1], [2, 2.25, 2.75, 3]], atol=1e-6)


def linear_parts(model, **changes):
    """Features that are the image's patches of 2 x 2, averaged."""
    apply = lambda params, x: params * x.reshape(len(x), 4, 2, 4, 2, -1).mean((2, 4))  # noqa: E731
    features = (apply, Frozen(lambda: jnp.float32(1), lambda: jnp.float32(1)))
    return methods.Parts(model, methods.optimizers(optax.sgd(0.1)), shape=(8, 8, 3), features=features, **changes)


def test_one_step_is_descent_on_both_losses():
    """Against a loss written out: weight 0 leaves the denoising loss, and the projection gets its own gradient."""
    model = DiT(channels=3, depth=2, width=8, heads=2, num_classes=0, learn_variance=False, scan=True)
    options = {"tap": "blocks_1/out", "width": 4}
    batch = {"image": jax.random.normal(jax.random.key(1), (4, 8, 8, 3))}
    held = {"features": jnp.float32(1)}
    method = methods.diffusion.build(Options(align=alignment.AlignOptions(0.7, **options)), linear_parts(model))
    off = methods.diffusion.build(Options(), linear_parts(model))
    state, step = jax.jit(method.init)(jax.random.key(0), batch, held), jax.jit(method.step)
    after, metrics = step(state, batch, jax.random.key(2))
    assert set(jax.eval_shape(off.init, jax.random.key(0), batch).params) == {"student"}
    assert set(state.params) == {"student", "projection"}
    shapes = jax.tree.map(jnp.shape, state.params["projection"])
    assert shapes["hidden0"]["kernel"] == (8, 4) and shapes["out"]["kernel"] == (4, 3)
    alone = state.replace(params={"student": state.params["student"]})
    plain = jax.jit(lambda: off.step(alone, batch, jax.random.key(2))[1]["loss"])()
    assert float(metrics["loss"]) == pytest.approx(float(plain) + 0.7 * float(metrics["alignment"]), rel=1e-5)
    # the output layer starts at zero, so the blocks' first gradients are those of the alignment alone
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), after.params, state.params)
    assert moved["student"]["blocks"]["block"]["modulation"]["dense"]["kernel"] > 0
    assert all(value > 0 for value in jax.tree.leaves(moved["projection"]))
    assert float(step(after, batch, jax.random.key(2))[1]["alignment"]) < float(metrics["alignment"])


@pytest.mark.parametrize("lora", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_runs_resume_to_the_same_bits_and_export_the_network_alone(tmp_path, lora):
    config, workdir = config_of(IMAGES, ALIGN), tmp_path / "run"
    if lora:
        plain = config_of(IMAGES, {"sample.count": 0})
        run, _ = prepare(plain, ONE)
        shapes = declare(run, prepare(plain, ONE)[1]).params["student"]
        rng = np.random.default_rng(0)
        export.write_config(tmp_path, plain)
        export.write(tmp_path, jax.tree.map(lambda s: (0.1 * rng.normal(size=s.shape)).astype(np.float32), shapes))
        config.lora.rank, config.train.init_from = lora, str(tmp_path)
    state = train(config, workdir, quiet=True, devices=ONE).state
    assert isinstance(state.params["student"], low_rank.Adapters) == bool(lora)
    assert set(state.params) == set(state.opt_state) == {"student", "projection"}
    assert [line["alignment"] < 1 for line in lines(workdir) if "alignment" in line] == [True] * 4
    assert not any(name.startswith("hidden") for name in export.read_arrays(workdir))
    shutil.rmtree(workdir / "checkpoints/4")
    assert_same_bits(train(config, workdir, quiet=True, devices=ONE).state, state)


def small(kind, model, example, file):
    """Random weights of a small network, in a file."""
    params = jax.jit(model.init)(jax.random.key(0), np.zeros(example, np.float32))["params"]
    weights.save(model, params, kind, file)
    return params


def test_latents_are_decoded_for_the_feature_network(tmp_path):
    autoencoder, net = models.TAESD(channels=4, width=8, blocks=(1, 1)), dinov2.DINOv2(width=64, depth=1)
    params = small("taesd", autoencoder, (1, 8, 8, 3), tmp_path / "taesd.npz")
    small("dinov2", net, (1, 28, 28, 3), tmp_path / "dinov2.npz")
    z = np.asarray(jax.random.normal(jax.random.key(1), (8, 4, 4, 4)))
    autoencoders.write(tmp_path / "z.npz", z, autoencoder)
    align = {"diffusion.align.net": "dinov2", "diffusion.align.path": str(tmp_path / "dinov2.npz")}
    source = {"data.source": "latents", "data.options": {"path": str(tmp_path / "z.npz")}, "eval.net": ""}
    changes = {**ALIGN, **align, **source, "diffusion.align.side": 28, "data.batch_size": 8, "train.steps": 2}
    with pytest.raises(ValueError, match=r"has latents of shape.*--config.autoencoder.kind"):
        prepare(config_of(IMAGES, changes), ONE)
    changes |= {"autoencoder.kind": "taesd", "autoencoder.path": str(tmp_path / "taesd.npz"), "train.log_every": 1}
    config = config_of(IMAGES, changes)
    features, frozen = features_of(config, load_data(config))
    found = jax.jit(features)(frozen.load(), z)
    images = autoencoders.decode(autoencoder, params, z)
    wanted = jax.jit(feature_net("dinov2", tmp_path / "dinov2.npz", side=28).apply)(images)["patches"]
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    assert found.shape == (8, 2, 2, 64) and np.std(wanted, axis=0).max() > 1e-2  # they depend on the image
    state = train(config, tmp_path / "run", quiet=True, devices=ONE).state
    assert set(state.frozen["features"]) == {"net", "autoencoder"}
    logged = [line["alignment"] for line in lines(tmp_path / "run") if "alignment" in line]
    assert len(logged) == 2 and np.isfinite(logged).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"diffusion.align.tap": "blocks_0/outs"}, "blocks_0/out"),
        ({"diffusion.align.tap": "blocks_0/modulation"}, "not a grid of an image 8x8"),
        ({"diffusion.align.net": "dinov3"}, "dinov2"),
        ({"data.source": "blank", "data.options.shape": (8, 8, 4), "eval.net": ""}, "takes features of images"),
        ({"diffusion.align.net": "dinov2"}, "needs its weights"),
    ],
)
def test_mistakes(changes, message):
    config = config_of(IMAGES, {**ALIGN, **changes})
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        declare(*prepare(config, ONE))
