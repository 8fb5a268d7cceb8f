"""The loop itself: accumulation, what is compiled and how often, non-finite values, evaluations, logs."""

import dataclasses
import io
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from training_runs import (
    IMAGES,
    POINTS,
    assert_close,
    config_of,
    lines,
    losses,
    methods,
    points_of,
    saved_state,
    saved_steps,
)

from jaxdiff.training import NonFinite, trainer
from jaxdiff.training.checkpoint import Checkpoints
from jaxdiff.training.logs import Logger, image_grid

ONE = jax.devices()[:1]


def train(changes, workdir, base=POINTS):
    return trainer.train(config_of(base, changes), workdir, quiet=True, devices=ONE)


@methods("consistency", score="f_distill", flow_map="scm")
def test_accumulated_gradients_are_those_of_the_whole_batch(tmp_path, method):
    changes = {"data.batch_size": 16, "train.steps": 4}
    whole = train(changes, tmp_path / "1", points_of(method))
    parts = train({**changes, "optim.accum_steps": 2}, tmp_path / "2", points_of(method))
    found, wanted = losses(tmp_path / "2"), losses(tmp_path / "1")
    np.testing.assert_allclose(list(found.values()), list(wanted.values()), rtol=1e-5)
    assert_close(parts.state.params, whole.state.params, 1e-5)
    norms = [[line["grad_norm"] for line in lines(tmp_path / name) if "loss" in line] for name in ("1", "2")]
    np.testing.assert_allclose(norms[0], norms[1], rtol=1e-4)


@methods("consistency", "sfd", score="dmd2", flow_map="meanflow")
def test_nothing_is_traced_or_compiled_after_the_first_round(tmp_path, monkeypatch, count_traces, method):
    """The step, the sampler of evaluations and that of grids: once each; from the second evaluation on nothing at all."""
    counted, compiled, seen = {}, [], []

    def build(config, data):
        run = real_build(config, data)
        counted.update(step=count_traces(run.method.step), sample=count_traces(run.method.sample))
        return dataclasses.replace(run, method=run.method._replace(**counted))

    class Noted(Logger):
        def progress(self, step):
            seen.append(len(compiled))

    real_build = trainer.build
    monkeypatch.setattr(trainer, "build", build)
    monkeypatch.setattr(trainer, "Logger", Noted)
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: compiled.append(event) if event.endswith("backend_compile_duration") else None
    )
    changes = {"train.eval_every": 3, "train.sample_every": 3, "eval.samples": 24, "train.steps": 12}
    train(changes, tmp_path, points_of(method))
    assert {name: function.traces for name, function in counted.items()} == {"step": 1, "sample": 1}
    assert len(seen) == 12 and seen[4] > 0 and len(set(seen[4:])) == 1, seen


# ------------------------------------------------------------------------------------------ non-finite values


def poison(monkeypatch, at):
    """Batches of the steps `at` (counted from 1) contain an infinity."""
    load = trainer.load_data

    def poisoned(config):
        dataset = load(config)
        size = config.data.batch_size

        def fetch(positions, executor):
            batch = dataset.fetch(positions, executor)
            if positions.start // size + 1 in at and len(positions) > 1:
                batch["image"] = np.where(np.arange(len(positions))[:, None] == 3, np.float32(np.inf), batch["image"])
            return batch

        return dataclasses.replace(dataset, fetch=fetch)

    monkeypatch.setattr(trainer, "load_data", poisoned)


def assert_saved_is_finite(workdir, method="diffusion"):
    for step in saved_steps(workdir):
        state = saved_state(workdir, step, config_of(points_of(method)))
        assert all(np.isfinite(np.asarray(a)).all() for a in jax.tree.leaves(state))


@pytest.mark.parametrize("log_every", [1, 10])
def test_a_non_finite_step_stops_the_run_and_is_named(tmp_path, monkeypatch, log_every):
    poison(monkeypatch, {5})
    with pytest.raises(NonFinite, match=r"NaN or infinite at step 5, first in image\."):
        train({"train.log_every": log_every}, tmp_path)
    assert saved_steps(tmp_path) == [3] and not (tmp_path / "export.safetensors").exists()
    assert_saved_is_finite(tmp_path)


@methods("consistency", "sfd", score="sid", flow_map="scm")
def test_a_learning_rate_that_explodes_names_an_array_and_saves_nothing_bad(tmp_path, method):
    changes = {"optim.learning_rate": 1e30, "optim.clip": 0.0, "optim.warmup_images": 0}
    with pytest.raises(
        NonFinite, match=r"at step \d, first in (loss|error|(params|opt_state)/[a-z0-9_/]+)\. .*lower the learning"
    ):
        train(changes, tmp_path, points_of(method))
    assert_saved_is_finite(tmp_path, method)


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_step_whose_metrics_are_finite_but_not_its_result_is_not_saved(tmp_path, policy):
    changes = {"optim.learning_rate": 3e38, "optim.warmup_images": 0, "train.save_every": 1}
    changes |= {"optim.name": "adamw", "optim.options": {"weight_decay": 1e3}}  # beyond what float32 holds
    with pytest.raises(NonFinite, match=r"[a-z0-9_/]+ is NaN or infinite after step 1, though .* not saved"):
        train({**changes, "train.on_nonfinite": policy, "train.log_every": 100}, tmp_path)
    assert saved_steps(tmp_path) == []


def test_skipped_steps_are_counted_and_leave_the_state(tmp_path, monkeypatch, capsys):
    steps = {"train.steps": 6, "train.on_nonfinite": "skip", "train.save_every": 1, "checkpoint.keep": 9}
    poison(monkeypatch, {3, 5})
    config = config_of(POINTS, steps)
    result = trainer.train(config, tmp_path, devices=ONE)
    assert result.step == 6 and int(result.state.step) == 6
    assert_saved_is_finite(tmp_path)
    before, after = saved_state(tmp_path, 2), saved_state(tmp_path, 3)
    assert_close(after.replace(step=before.step), before, 0)
    events = [line for line in lines(tmp_path) if "skipped" in line]
    assert events[0]["skipped"] == 1 and events[-1]["skipped"] == 2 and events[-1]["first_step"] == 3
    assert "skipped 2 non-finite step(s) so far, first at step 3" in capsys.readouterr().out
    assert 3 not in losses(tmp_path) and {4, 6} <= set(losses(tmp_path))


# ------------------------------------------------------------------------------------------ evaluations and images


def test_a_run_on_images_writes_grids_evaluations_and_the_best_checkpoint(tmp_path, monkeypatch):
    """Distances are made up, so that the best evaluation is known; the checkpoint of that step outlives a restart."""
    distances = iter([3.0, 1.0, 2.0, 5.0])
    real = trainer.Loop._note
    ranked = lambda *a: {name: next(distances) for name in real(*a)}  # noqa: E731
    monkeypatch.setattr(trainer.Loop, "_note", ranked)
    every = {"train.eval_every": 2, "train.save_every": 2, "train.sample_every": 4, "checkpoint.keep": 1}
    quick = {"eval.net": "digits", "eval.samples": 20, "eval.reference": 40, "sample.timestamps": 2}
    for steps in (6, 8):
        result = train({**every, **quick, "train.steps": steps}, tmp_path, IMAGES)
    assert saved_steps(tmp_path) == [4, 8]
    records = lines(tmp_path, "evaluations.jsonl")
    assert [record["step"] for record in records] == [2, 4, 6, 8]
    assert {k: v for k, v in records[-1].items() if k != "step"} == result.metrics
    text = str(records[-1])
    assert all(word in text for word in ("digits", "heun", "feature_sha256", "reference_sha256", "guidance"))
    assert 0 <= records[-1]["accuracy"] <= 1
    grids = sorted(path.name for path in (tmp_path / "samples").iterdir())
    assert grids == ["samples_00000004.png", "samples_00000006.png", "samples_00000008.png"]
    with Image.open(tmp_path / "samples" / grids[0]) as grid:  # 6 images of 8 x 8 in 3 columns, 1 apart, enlarged
        assert grid.size == (4 * (3 * 9 + 1), 4 * (2 * 9 + 1)) and grid.mode == "RGB"


def test_grids():
    images = np.full((5, 4, 6, 1), -1.0)
    images[4] = 1.0
    grid = image_grid(images, columns=2, gap=1, scale=2)
    assert grid.shape == (2 * (3 * 5 + 1), 2 * (2 * 7 + 1), 3) and grid.dtype == np.uint8
    assert grid[2, 2].tolist() == [0, 0, 0] and grid[0, 0].tolist() == [255] * 3
    assert grid[2 * 11, 2].tolist() == [255] * 3  # the last image, in the third row
    assert image_grid(np.zeros((1, 64, 64, 3))).shape == (66, 66, 3)  # large ones are not enlarged


def test_the_best_checkpoint_survives_beside_the_newest(tmp_path):
    for values in ([(1, 3.0), (2, 1.0), (3, 2.0), (4, None)], [(5, 4.0), (6, None), (7, None)], [(8, 0.5), (9, 2.0)]):
        checkpoints = Checkpoints(tmp_path / "checkpoints", 2, "distance")
        for step, value in values:
            checkpoints.save(step, {"a": jnp.zeros(3)}, None if value is None else {"distance": value})
        checkpoints.wait()
        checkpoints.close()
        assert 2 in saved_steps(tmp_path) or step == 9
    assert saved_steps(tmp_path) == [8, 9]


# ------------------------------------------------------------------------------------------ the logger


@pytest.mark.parametrize("terminal", [True, False])
def test_a_progress_bar_only_on_a_terminal(tmp_path, monkeypatch, terminal):
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(sys, "stderr", stream)
    log = Logger(tmp_path, 10, 4)
    log.progress(5)
    log.say("a line")
    log.close()
    assert ("5/10" in stream.getvalue() or "4/10" in stream.getvalue()) == terminal


def test_a_quiet_logger_still_writes_its_files(tmp_path, capsys):
    log = Logger(tmp_path, quiet=True)
    log.scalars(3, {"loss": 0.5, "note": "text"})
    log.close()
    assert capsys.readouterr().out == ""
    assert lines(tmp_path)[0]["step"] == 3 and lines(tmp_path)[0]["loss"] == 0.5
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))


def test_a_log_that_cannot_be_written_says_which(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    log = Logger(tmp_path, quiet=True)
    with pytest.raises(OSError, match=r"cannot write .*metrics\.jsonl: .*No space left on device"):
        log.event({"step": 1})
    log.close()
