"""Teachers of your own: one network in plain JAX, NNX, Linen and NumPy, from training to sampling."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import own_files
import pytest

import jaxdiff
from jaxdiff import outside
from jaxdiff.cli import main, teachers
from jaxdiff.methods import METHODS
from jaxdiff.training import export, inherit, load_data, train
from jaxdiff.training.build import build

ONE = jax.devices()[:1]
SMALL = [
    ("data.source", "mixture"),
    ("data.options", "{'preset': 'ring', 'count': 90}"),
    ("data.batch_size", "8"),
    ("compile_cache", ""),
]
MLP = [("model.name", "mlp"), ("model.fields.width", "8"), ("model.fields.depth", "1"), ("denoiser.sigma_data", "0.7")]


def student(reference, method="sfd", argument="", overrides=(), steps=2):
    base = teachers.config_of("python", reference, overrides)
    config = inherit.student_config(base, method, argument, "python", reference)
    with config.unlocked():
        config.train.steps, config.train.log_every, config.train.save_every = steps, 1, steps
        config.optim.decay_images = 8 * steps
        config.data.batch_size, config.compile_cache, config.sample.batch_size = 8, "", 8
    return config


@pytest.mark.parametrize("kind", own_files.KINDS)
def test_every_kind_is_the_same_denoiser(tmp_path, kind):
    reference = own_files.write(tmp_path, kind)
    saved = teachers.opened(reference, "", MLP if kind == "host" else [])
    w, rng = own_files.weights(), np.random.default_rng(1)
    x, label = rng.normal(size=(5, 2)).astype(np.float32), np.array([0, 1, 2, 8, 8], np.int32)
    sigma = 1.3
    scale = np.sqrt(sigma**2 + 0.49)
    h = np.concatenate([x / scale, np.full((5, 1), np.log(sigma) / 4)], 1)
    network = np.tanh(h @ w["A"] + w["E"][label]) @ w["B"]
    expected = 0.49 / scale**2 * x + 0.7 * sigma / scale * network
    found = saved.denoiser(jnp.asarray(x), sigma, {"label": jnp.asarray(label)})
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)
    assert saved.sample(0, 4, nfe=3).shape == (4, 2)


@pytest.mark.parametrize("kind", ["plain", "nnx", "linen"])
def test_a_student_starts_from_the_teacher_and_is_sampled_without_it(tmp_path, kind, capsys):
    reference = own_files.write(tmp_path, kind)
    config = student(reference, steps=1)
    config.optim.learning_rate = 0.0
    train(config, tmp_path / "run", devices=ONE)
    assert "the student starts from the teacher's parameters" in capsys.readouterr().out
    (tmp_path / f"my_{kind}.py").unlink()
    saved = jaxdiff.load(tmp_path / "run", devices=ONE)
    for name, value in own_files.weights().items():
        np.testing.assert_array_equal(saved.params[name], value)
    assert np.isfinite(saved.sample(0, 3, label=1)).all()
    record = json.loads((tmp_path / "run" / "config.json").read_text())
    copy = tmp_path / "run" / "code" / f"my_{kind}.py"
    assert record["model"]["name"].startswith(f"code/my_{kind}.py:")
    assert record["model"]["sha256"] == record["teacher"]["sha256"] == outside.digest(copy)


def test_sampling_a_student_with_a_network_of_the_package_executes_nothing(tmp_path, capsys):
    reference = own_files.write(tmp_path, "plain")
    train(student(reference, "emd", overrides=MLP), tmp_path / "run", devices=ONE)
    assert "the student starts untrained" in capsys.readouterr().out
    for file in (tmp_path / "my_plain.py", tmp_path / "run" / "code" / "my_plain.py"):
        file.write_text("raise RuntimeError('executed')")
    assert jaxdiff.load(tmp_path / "run", devices=ONE).sample(0, 3).shape == (3, 2)


def test_a_changed_teacher_is_refused_when_a_run_resumes(tmp_path):
    reference = own_files.write(tmp_path, "plain")
    train(student(reference), tmp_path / "run", devices=ONE, quiet=True)
    file = tmp_path / "my_plain.py"
    file.write_text(file.read_text() + "\n# edited\n")
    config = export.read_config(tmp_path / "run")
    with pytest.raises(ValueError, match="has changed since the run began"):
        train(config, tmp_path / "run", devices=ONE, quiet=True)
    file.unlink()
    assert str(tmp_path / "run" / "code") in export.read_config(tmp_path / "run").teacher.path


@pytest.mark.parametrize("method", [name for name, entry in METHODS.items() if entry.values_only])
def test_a_teacher_on_the_host_trains_the_same_student(tmp_path, method):
    """Methods marked values_only use what the teacher returns and nothing of its gradient."""
    results = []
    for kind in ("plain", "host"):
        reference = own_files.write(tmp_path, kind)
        config = student(reference, method, "2" if method == "sfd" else "", [*SMALL, *MLP])
        config.teacher.own = False
        results.append(train(config, tmp_path / kind, devices=ONE, quiet=True).state.params)
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-5)


def test_a_method_that_differentiates_its_teacher_refuses_one_on_the_host(tmp_path, monkeypatch):
    monkeypatch.setitem(METHODS, "emd", METHODS["emd"]._replace(values_only=False))
    config = student(own_files.write(tmp_path, "host"), "emd", overrides=MLP)
    with pytest.raises(ValueError, match=r"emd takes gradients through its teacher.*sfd"):
        train(config, tmp_path / "run", devices=ONE, quiet=True)


def test_what_does_not_fit_is_named(tmp_path):
    reference = own_files.write(tmp_path, "host")
    with pytest.raises(ValueError, match=r"gives no network.*model.name=unet"):
        teachers.config_of("python", reference, [])
    plain = own_files.write(tmp_path, "plain")
    wide = student(plain, "sfd", "2", [*MLP, ("data.source", "digits")])
    with pytest.raises(ValueError, match=r"\(2,\), digits has \(8, 8, 1\)"):
        train(wide, tmp_path / "run", devices=ONE, quiet=True)
    with pytest.raises(ValueError, match="num_classes=8, the student's network 2"):
        train(student(plain, overrides=[*MLP, ("data.source", "blank"), ("data.options", "{'shape': (2,), 'num_classes': 2}")]), tmp_path / "b", quiet=True)  # fmt: skip
    (tmp_path / "odd.py").write_text("def load(config): return 3\nnumber = 3\n")
    with pytest.raises(TypeError, match="returned a int"):
        teachers.config_of("python", f"{tmp_path / 'odd.py'}:load", [])
    with pytest.raises(TypeError, match="must be a function"):
        teachers.config_of("python", f"{tmp_path / 'odd.py'}:number", [])
    with pytest.raises(ValueError, match="has no 'laod'; it defines load, number"):
        teachers.config_of("python", f"{tmp_path / 'odd.py'}:laod", [])
    with pytest.raises(ValueError, match=r"denoiser=.*or network="):
        jaxdiff.Teacher({}, (2,))


def test_the_command_line_trains_samples_and_evaluates(tmp_path, monkeypatch, capsys):
    reference = own_files.write(tmp_path, "linen")
    monkeypatch.chdir(tmp_path)
    common = ["--config.teacher.kind=python", f"--config.teacher.path={reference}", "--config.compile_cache="]
    assert main(["train", "--config=sfd:2", *common, "--config.train.steps=2", "--workdir=few"]) == 0
    assert main(["sample", "--workdir=few", "--count=3", "--out=few.npz"]) == 0
    assert np.load("few.npz")["images"].shape == (3, 2)
    assert main(["sample", f"--teacher={reference}", "--count=3", "--nfe=5", "--out=own.npz"]) == 0
    assert "5 evaluations" in capsys.readouterr().out
    evaluated = [f"--config.{key}={text}" for key, text in SMALL]
    assert main(["evaluate", f"--teacher={reference}", "--nfe=3", "--config.eval.samples=64", *evaluated]) == 0
    assert "sliced_wasserstein" in capsys.readouterr().out


def test_plan_takes_a_python_teacher(tmp_path):
    from jaxdiff.training import state
    from jaxdiff.training.sampling import mesh_of

    config = student(own_files.write(tmp_path, "nnx"), "emd")
    run = build(config, load_data(config))
    declared = state.declare(run, mesh_of(config, ONE))
    assert declared.frozen["teacher"]["A"].shape == (3, own_files.WIDTH)


def test_check_tells_a_right_teacher_from_a_wrong_one(tmp_path, capsys):
    """The exact denoiser of one Gaussian passes; with its sign turned, or against other golden outputs, it does not."""
    (tmp_path / "exact.py").write_text(
        "import jaxdiff\nfrom jaxdiff import denoisers\nD = denoisers.gaussian(0.0, 0.5)\n"
        "def load(config): return jaxdiff.Teacher({}, (2,), denoiser=lambda p: D)\n"
        "def wrong(config): return jaxdiff.Teacher({}, (2,), denoiser=lambda p: lambda x, s, c=None: -D(x, s, c))\n"
    )
    common = [f"--config.{key}={text}" for key, text in MLP] + ["--config.compile_cache=", "--nfe=5", "--out="]
    x = np.random.default_rng(0).normal(size=(4, 2)).astype(np.float32)
    np.savez(tmp_path / "golden.npz", x=x, sigma=1.0, x0=x * 0.25 / 1.25)  # the posterior mean of N(0, 0.5^2)
    np.savez(tmp_path / "other.npz", x=x, sigma=1.0, x0=x * 0.3)
    check = ["check", f"--teacher={tmp_path}/exact.py:load", *common]
    assert main([*check, f"--golden={tmp_path}/golden.npz"]) == 0
    assert "BAD" not in capsys.readouterr().out
    assert main([*check, f"--golden={tmp_path}/other.npz"]) == 1
    assert "BAD golden" in capsys.readouterr().out
    assert main(["check", f"--teacher={tmp_path}/exact.py:wrong", *common]) == 1
    assert "BAD convention" in capsys.readouterr().out
