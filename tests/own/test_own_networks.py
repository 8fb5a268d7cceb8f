"""Networks and files from outside the package: trained, sampled later, saved as teachers; and what used to stop users."""

import json
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import own_files
import pytest
from ml_collections import ConfigDict

import jaxdiff
from jaxdiff import models, outside
from jaxdiff.cli import main, teachers
from jaxdiff.conventions import EDM
from jaxdiff.methods import METHODS, Frozen, Parts, Teacher, optimizers
from jaxdiff.training import export, inherit, load_data
from jaxdiff.training.build import build

ONE = jax.devices()[:1]
CONFIG = """
import jax.numpy as jnp
from flax import linen as nn
from ml_collections import ConfigDict
from jaxdiff.configs import default
from jaxdiff.models import MODELS
{imports}

class Scale(nn.Module):
    channels: int = 2
    @nn.compact
    def __call__(self, x, noise_label, cond=None):
        return x * self.param("scale", nn.initializers.ones, (self.channels,))

MODELS["scale"] = Scale

def get_config():
    c = default.get_config()
    c.model.name, c.data.source, c.data.batch_size, c.eval.net, c.compile_cache = "scale", "mixture", 8, "", ""
    c.data.options = ConfigDict({{"count": 64}})
    c.train.steps, c.train.log_every, c.train.save_every, c.sample.timestamps = 2, 1, 2, 3
    return c
"""


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """A run of a network that its config file registers, in a process that then forgets it."""
    (tmp_path / "helper.py").write_text("value = 1\n")
    (tmp_path / "mine.py").write_text(CONFIG.format(imports=f"import helper  # of {tmp_path}"))  # not yet imported
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["train", f"--config={tmp_path / 'mine.py'}", f"--workdir={tmp_path / 'run'}"]) == 0
    yield tmp_path / "run"
    models.MODELS.pop("scale", None)
    sys.modules.pop("helper", None)


def test_a_network_of_a_config_file_can_be_sampled_later(trained):
    record = json.loads((trained / "config.json").read_text())
    assert record["model"]["name"] == "code/mine.py:Scale"
    assert record["model"]["sha256"] == outside.digest(trained / "code" / "mine.py")
    del models.MODELS["scale"]
    (trained.parent / "mine.py").unlink()
    saved = jaxdiff.load(trained, devices=ONE)
    assert saved.sample(0, 3).shape == (3, 2)
    assert list(saved.run.conditions) == ["label"]  # though the class has no field num_classes


def test_what_a_copied_file_lacks_is_named(trained, monkeypatch):
    del models.MODELS["scale"]
    sys.modules.pop("helper")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(trained.parent)])
    with pytest.raises(ModuleNotFoundError, match=r"imports helper.*beside mine.py"):
        jaxdiff.load(trained, devices=ONE)
    copy = trained / "code" / "mine.py"
    copy.write_text(copy.read_text() + "# edited")
    with pytest.raises(ValueError, match="has changed since the run wrote it"):
        jaxdiff.load(trained, devices=ONE)
    copy.unlink()
    with pytest.raises(FileNotFoundError, match=r"code/mine.py, which is missing"):
        jaxdiff.load(trained, devices=ONE)


def test_a_class_of_a_notebook_is_told_to_be_registered(tmp_path):
    made = type("Made", (models.MLP,), {"__module__": "__main__"})
    models.MODELS["made"] = made
    config = teachers.default.get_config()
    config.model.name = "made"
    export.write_config(tmp_path, config)
    del models.MODELS["made"]
    with pytest.raises(ValueError, match="unknown model 'made'"):
        jaxdiff.load(tmp_path)


# ------------------------------------------------------------------------------------------ save_teacher


def test_a_saved_network_is_a_run(tmp_path):
    model = models.MLP(channels=2, width=8, depth=1)
    params = model.init(jax.random.key(0), jnp.zeros((1, 2)), jnp.ones(1))["params"]
    path = jaxdiff.save_teacher(model, params, tmp_path / "mine", shape=(2,), convention=EDM(0.7))
    saved = jaxdiff.load(path, devices=ONE)
    x = jnp.ones((3, 2))
    expected = EDM(0.7)(models.bind(model, params))(x, 1.5)
    np.testing.assert_array_equal(saved.denoiser(x, 1.5), expected)
    config = inherit.student_config(inherit.run_config(path), "sfd", "2", "run", str(path))
    assert config.model.name == "mlp" and config.denoiser.sigma_data == 0.7
    run = build(config, load_data(config))
    np.testing.assert_array_equal(run.method.frozen["teacher"].load()["in"]["kernel"], params["in"]["kernel"])


def test_a_saved_file_is_what_a_teacher_of_kind_run_reads(tmp_path):
    model = models.MLP(channels=2, width=8, depth=1)
    params = model.init(jax.random.key(0), jnp.zeros((1, 2)), jnp.ones(1))["params"]
    file = jaxdiff.save_teacher(model, params, tmp_path / "mine.safetensors")
    config = inherit.student_config(teachers.config_of("python", own_files.write(tmp_path, "plain"), MLP), "emd", "", "run", str(file))  # fmt: skip
    config.data.options = ConfigDict({"shape": (2,)})
    loaded = build(config, load_data(config)).method.frozen["teacher"].load()
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), loaded, params))


def test_save_teacher_says_what_it_needs(tmp_path):
    model = models.MLP(channels=2, width=8, depth=1)
    with pytest.raises(ValueError, match="give shape="):
        jaxdiff.save_teacher(model, {}, tmp_path / "mine")


# ------------------------------------------------------------------------------------------ what used to stop users

MLP = [("model.name", "mlp"), ("model.fields.width", "8"), ("model.fields.depth", "1"), ("compile_cache", "")]


def test_a_function_is_told_how_to_become_a_student():
    def network(x, noise_label, cond=None):
        return x

    with pytest.raises(TypeError, match=r"models.Plain\(init, apply\)"):
        Parts.__post_init__(SimpleNamespace(model=network))  # type checks of the tests would come before its own
    plain = models.Plain(lambda key: {"w": jnp.ones(())}, lambda params, x, noise_label, cond: params["w"] * x)
    parts = Parts(plain.module(channels=2), optimizers(optax.sgd(0.1)))
    assert parts.initial(jax.random.key(0), {"image": jnp.ones((1, 2))})["w"] == 1
    assert parts.denoiser({"w": jnp.float32(0.0)})(jnp.ones((3, 2)), 1.0).shape == (3, 2)
    with pytest.raises(TypeError, match="is no network"):
        models.plain.model_class(network)


def test_whether_a_student_starts_from_its_teacher_must_be_said():
    with pytest.raises(TypeError, match="own"):
        Teacher(lambda params: None, Frozen(dict, dict))


def test_one_student_for_several_counts_needs_a_step_embedding(tmp_path):
    config = teachers.config_of("python", own_files.write(tmp_path, "plain"), [])
    assert inherit.student_config(config, "sfd", "", "python", "x").sfd.nfe == (2,)
    several = inherit.student_config(config, "sfd", "2,3", "python", "x")
    with pytest.raises(ValueError, match="step_embed"):
        build(several, load_data(several))


TAU = ("facm", "meanflow", "shortcut", "trajectory")  # methods whose network takes a second noise level


@pytest.mark.parametrize("method", TAU)
def test_flow_maps_refuse_a_network_without_a_second_noise_level(tmp_path, method):
    reference = own_files.write(tmp_path, "plain")
    config = teachers.config_of("python", reference, [])
    with pytest.raises(ValueError, match=f"{method} needs a network that takes a second noise level"):
        inherit.student_config(config, method, "", "python", reference)


@pytest.mark.parametrize(
    "method",
    [n for n, entry in METHODS.items() if entry.recipe and not entry.real(entry.options()) and n not in TAU],
)
def test_a_batch_without_labels_trains(tmp_path, method):
    """Methods that draw labels themselves do not look for them in the batch; the others take no class."""
    reference = own_files.write(tmp_path, "plain")
    data = [("data.source", "mixture"), ("data.options", "{'preset': 'ring', 'count': 90}")]
    config = inherit.student_config(teachers.config_of("python", reference, data), method, "", "python", reference)
    run = build(config, load_data(config))
    batch = {"image": jnp.ones((4, 2))}
    frozen = {"teacher": run.method.frozen["teacher"].load()}
    state = jax.eval_shape(run.method.init, jax.random.key(0), batch, frozen)
    _, metrics = jax.eval_shape(run.method.step, state, batch, jax.random.key(1))
    assert metrics


def test_a_head_on_activations_refuses_a_network_without_them(tmp_path):
    reference = own_files.write(tmp_path, "plain")
    data = [("data.source", "mixture"), ("data.options", "{'preset': 'ring', 'count': 90}")]
    config = inherit.student_config(teachers.config_of("python", reference, data), "dmd2", "", "python", reference)

    def begin():
        run = build(config, load_data(config))
        frozen = {"teacher": run.method.frozen["teacher"].load()}
        jax.eval_shape(run.method.init, jax.random.key(0), {"image": jnp.ones((4, 2))}, frozen)

    with pytest.raises(ValueError, match="no named activations"):
        begin()


def test_evaluate_takes_images_and_features_of_your_own(tmp_path, capsys):
    """Features that are the mean of each image: the Fréchet distance of two Gaussians in one dimension."""
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "images.npz", images=rng.integers(0, 255, (80, 4, 4, 1), np.uint8))
    (tmp_path / "features.py").write_text(
        "import jax.numpy as jnp\ndef pooled(images):\n    x = jnp.asarray(images, jnp.float32) / 255\n"
        "    return jnp.stack([x.mean((1, 2, 3)), x.std((1, 2, 3))], 1)\n"
    )
    (tmp_path / "exact.py").write_text(
        "import jaxdiff\nfrom jaxdiff import denoisers\n"
        "def load(config): return jaxdiff.Teacher({}, (4, 4, 1), denoiser=lambda p: denoisers.gaussian(0.0, 0.5))\n"
    )
    student = ["--config.model.name=unet", "--config.model.fields.width=8", "--config.model.fields.resolution=4"]
    arguments = ["--config.eval.samples=64", "--config.compile_cache=", "--nfe=3"]
    own = [f"--images={tmp_path}/images.npz", f"--config.eval.net={tmp_path}/features.py:pooled"]
    assert main(["evaluate", f"--teacher={tmp_path}/exact.py:load", *student, *arguments, *own]) == 0
    out = capsys.readouterr().out
    assert "frechet_pooled: " in out and outside.digest(tmp_path / "features.py") in out
