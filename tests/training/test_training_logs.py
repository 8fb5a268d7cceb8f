"""Where metrics go: backends, the callback, the order of a console line, FLOP/s, profiles."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from training_runs import POINTS, config_of, lines

from jaxdiff import chips, flops
from jaxdiff.training import backends, prepare, train
from jaxdiff.training.logs import Logger
from jaxdiff.training.pace import Pace

ONE = jax.devices()[:1]
SHORT = {**POINTS, "train.steps": 4, "train.save_every": 4, "train.log_every": 2}


class Recorder(backends.Backend):
    """Keeps what it is sent."""

    def __init__(self, target):
        super().__init__(target)
        self.sent, self.closed = [], False
        Recorder.last = self

    def scalars(self, step, values):
        self.sent.append((step, dict(values)))

    def image(self, step, name, pixels):
        self.sent.append((step, name, pixels.shape))

    def close(self):
        self.closed = True


def test_a_backend_of_ones_own_and_a_callback_get_the_same_metrics(tmp_path, monkeypatch):
    monkeypatch.setitem(backends.BACKENDS, "recorder", Recorder)
    heard = []
    config = config_of(SHORT, {"log.backends": ("recorder", "jsonl")})
    train(config, tmp_path, quiet=True, devices=ONE, on_metrics=lambda step, values: heard.append((step, values)))
    assert [step for step, _ in heard] == [2, 4] and Recorder.last.sent == heard and Recorder.last.closed
    written = [line for line in lines(tmp_path) if "loss" in line]
    assert [line["loss"] for line in written] == [values["loss"] for _, values in heard]
    assert not (tmp_path / "tensorboard").exists()
    values = heard[-1][1]
    assert values["minutes_left"] == 0 and 0 <= values["data_wait"] <= 1 and values["tflops_per_device"] > 0
    assert "mfu" not in values  # a CPU has no entry in the table of chips


def test_logged_flops_are_those_of_the_model_with_and_without_recomputation(tmp_path):
    fields = {"patch": 4, "depth": 2, "width": 16, "heads": 2, "learn_variance": False}
    base = {**SHORT, "data.source": "digits", "model.name": "dit", "model.fields": fields, "train.steps": 1}
    del base["data.options.count"], base["model.fields.width"], base["model.fields.depth"]
    counted = {}
    for remat in ("", "full"):
        config = config_of(base, {"model.remat": remat, "sample.count": 0})
        workdir = tmp_path / (remat or "none")
        train(config, workdir, quiet=True, devices=ONE)
        (line,) = [line for line in lines(workdir) if "loss" in line]
        counted[remat] = line["tflops_per_device"] * 1e12 / line["steps_per_second"]
    run, _ = prepare(config_of(base), ONE)
    batch = run.example(8)
    state = jax.eval_shape(run.method.init, jax.random.key(0), batch)
    expected = flops.total(jax.make_jaxpr(run.method.step)(state, batch, jax.random.key(0)).jaxpr)
    assert counted[""] == pytest.approx(expected, rel=1e-6) and counted["full"] == pytest.approx(counted[""], rel=1e-6)


def test_speed_wait_and_mfu_are_those_of_the_clock(tmp_path):
    times = iter([0.0, 1.0, 1.2, 1.5, 1.9, 4.0, 4.0])  # start; wait and work twice; the line; its restart
    log = Logger(tmp_path, quiet=True)
    log.flops = 10**9
    pace = Pace(0, 10, log, devices=2, now=lambda: next(times))
    pace.peak = 1e9
    for batch in pace.waiting([1, 2]):
        pace.add({"loss": jnp.float32(batch)})
        if batch == 2:
            break
    values = pace.line(2)
    log.close()
    assert values["loss"] == 1.5 and values["steps_per_second"] == pytest.approx(0.5)
    assert values["minutes_left"] == pytest.approx(16 / 60) and values["data_wait"] == pytest.approx(0.6 / 4)
    assert values["tflops_per_device"] == pytest.approx(2.5e-4) and values["mfu"] == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("kind", "chip"),
    [
        ("TPU v5 lite", "v5e"),
        ("TPU v6 lite", "v6e"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
    ],
)
def test_peaks_of_devices(kind, chip):
    assert chips.peak_of(kind) == chips.CHIPS[chip].flops
    assert chips.peak_of("cpu") == chips.peak_of("NVIDIA H100 PCIe") == 0


def test_console_lines_open_with_loss_speed_and_time_left():
    said = []
    stdout = backends.Stdout(backends.Target(None, None, said.append))
    stdout.scalars(7, {"grad_norm": 1.0, "minutes_left": 61.5, "steps_per_second": 12.345, "loss": 0.5, "mfu": 0.41})
    assert said == ["step 7: loss 0.5, 12.3 steps/s, 1 h 1 min left, grad_norm 1, mfu 41 %"]
    stdout.scalars(8, {"eval/fid": 3.0})
    assert said[-1] == "step 8: eval/fid 3"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (59.6, "1 min"), (61, "1 min 1 s"), (3600, "1 h"), (200000, "2 d 7 h")]
)
def test_durations(seconds, text):
    assert backends.duration(seconds) == text


def test_profiles_are_written(tmp_path):
    """In a process of its own: the profiler also asks the compilers of other platforms that a process has loaded."""
    overrides = ["--config.train.profile_steps=(1,3)", "--config.train.steps=4", "--config.compile_cache="]
    command = [sys.executable, "-m", "jaxdiff.cli", "train", "--config=mixture2d:tiny", *overrides]
    environment = {name: value for name, value in os.environ.items() if name != "JAX_NUMPY_DTYPE_PROMOTION"}
    done = subprocess.run([*command, f"--workdir={tmp_path}"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))


@pytest.mark.parametrize(
    ("change", "error"),
    [({"log.backends": ("stdout", "tensorbord")}, "tensorboard"), ({"train.profile_steps": (5, 5)}, "profile_steps")],
)
def test_mistakes_are_found_before_anything_is_written(tmp_path, change, error):
    with pytest.raises(ValueError, match=error):
        train(config_of(SHORT, change), tmp_path / "run", quiet=True, devices=ONE)
    assert not (tmp_path / "run").exists()


def test_weights_and_biases_offline(tmp_path, monkeypatch):
    """Without a connection, and the same run after a resumption."""
    for name, value in (("MODE", "offline"), ("SILENT", "true"), ("DISABLE_GIT", "true"), ("_DISABLE_STATS", "true")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    config = config_of({**SHORT, "log.wandb.mode": "offline"}, {"log.backends": ("wandb", "jsonl")})
    train(config, tmp_path, quiet=True, devices=ONE)
    identity = (tmp_path / "wandb_id.txt").read_text()
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    (file,) = folder.glob("run-*.wandb")
    assert identity in file.name and b"tflops_per_device" in file.read_bytes()


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"jaxdiff\[wandb\]"):
        backends.WeightsAndBiases(backends.Target(tmp_path, None, print))
