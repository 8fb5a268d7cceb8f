"""A method, a network and a conditioning signal from outside the package, one file each: trained, resumed, sharded,
exported and sampled like those of the package."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_runs import assert_close, assert_same_bits, config_of

import jaxdiff
from jaxdiff import data, methods, models
from jaxdiff.training import train

ONE = jax.devices()[:1]
BASE = {
    "data.source": "digits",
    "data.batch_size": 16,
    "optim.warmup_images": 32,
    "eval.net": "",
    "train.steps": 4,
    "train.save_every": 2,
    "sample.timestamps": 3,
    "sample.batch_size": 8,
    "sample.count": 0,
    "compile_cache": "",
}
TOYS = {
    "network": {"model.name": "pixel_mlp"},
    "method": {"method.name": "absolute", "model.name": "pixel_mlp"},
    "signal": {"data.source": "bright_digits", "model.name": "brightness_net", "diffusion.cond_dropout": 0.1},
}


@pytest.fixture(scope="module", autouse=True)
def _registered():
    """The toys register themselves when imported; other tests count what the package has."""
    tables = [methods.METHODS, models.MODELS, data.SOURCES]
    before = [dict(table) for table in tables]
    for name in ("toy_method", "toy_network", "toy_signal"):
        importlib.import_module(name)
    yield
    for table, entries in zip(tables, before, strict=True):
        for name in set(table) - set(entries):
            del table[name]


@pytest.mark.parametrize("toy", TOYS)
def test_toys_are_first_class(toy, tmp_path):
    base = {**BASE, **TOYS[toy]}
    straight = train(config_of(base), tmp_path / "straight", quiet=True, devices=ONE)
    train(config_of(base, {"train.steps": 2}), tmp_path / "resumed", quiet=True, devices=ONE)
    resumed = train(config_of(base), tmp_path / "resumed", quiet=True, devices=ONE)
    assert_same_bits(resumed.state, straight.state)
    spread = {"mesh.data": 4, "mesh.fsdp": 2, "mesh.min_size": 16}
    sharded = train(config_of(base, spread), tmp_path / "sharded", quiet=True)
    assert_close(sharded.state.params, straight.state.params, 2e-5)
    images = jaxdiff.load(tmp_path / "straight").sample(0, 5)
    assert images.shape == (5, 8, 8, 1) and np.isfinite(images).all()
    np.testing.assert_allclose(jaxdiff.load(tmp_path / "sharded").sample(0, 5), images, rtol=1e-4, atol=1e-4)


def test_a_signal_reaches_the_network(tmp_path):
    """Another default brightness makes other samples; dropping it in training uses its null value."""
    train(config_of({**BASE, **TOYS["signal"]}), tmp_path, quiet=True, devices=ONE)
    saved = jaxdiff.load(tmp_path)
    assert saved.run.conditions["brightness"].null == 0.0
    np.testing.assert_allclose(saved.run.control["brightness"], [-0.4])
    x, cond = jnp.ones((2, 8, 8, 1)), {"brightness": jnp.array([[-0.9], [0.5]])}
    out = np.asarray(saved.denoiser(x, 1.0, cond))
    assert np.abs(out[0] - out[1]).max() > 1e-4
