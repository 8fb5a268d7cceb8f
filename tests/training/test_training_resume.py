"""A run that is killed, stopped or interrupted, in real processes, ends like one that was not, to the bit."""

import hashlib
import json
import os
import random
import re
import shutil
import signal

import pytest
from training_runs import (
    POINTS,
    assert_same_bits,
    config_of,
    finish,
    lines,
    losses,
    methods,
    points_of,
    run,
    saved_state,
    saved_steps,
    start,
    wait_for,
)

from jaxdiff.training import load_data
from jaxdiff.training.distributed import RETRY

STEPS, EVERY = POINTS["train.steps"], POINTS["train.save_every"]
RANDOM = random.Random(3)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The run that nothing happens to."""
    workdir = tmp_path_factory.mktemp("straight")
    code, out, err = run(workdir)
    assert code == 0, err
    return workdir, out, err


def assert_like(workdir, straight, method="diffusion"):
    """Parameters, optimizer, average and every loss, to the bit; and each step saw the batch it should."""
    assert saved_steps(workdir)[-1] == STEPS
    config = config_of(points_of(method))
    assert_same_bits(saved_state(workdir, STEPS, config), saved_state(straight, STEPS, config))
    assert (workdir / "export.safetensors").read_bytes() == (straight / "export.safetensors").read_bytes()
    assert losses(workdir) == losses(straight) and list(losses(straight)) == list(range(1, STEPS + 1))
    for line in lines(workdir, "batches.jsonl"):
        assert line in lines(straight, "batches.jsonl")
    assert not list((workdir / "checkpoints").glob("*tmp*"))


def test_the_batches_are_those_of_seed_and_step(straight):
    dataset = load_data(config_of())
    for step, line in enumerate(lines(straight[0], "batches.jsonl")):
        batch = dataset.batch(step, POINTS["data.batch_size"])
        digest = hashlib.sha256(b"".join(batch[name].tobytes() for name in sorted(batch))).hexdigest()
        assert line == {"step": step, "sha256": digest}
    assert step == STEPS - 1


def test_killed_stopped_interrupted_and_run_again(straight, tmp_path):
    """One run through all of it, each time going on where the last process left off."""
    assert run(tmp_path, moment="step", step=1, signal="SIGKILL")[0] == -signal.SIGKILL
    assert saved_steps(tmp_path) == []

    at = RANDOM.randrange(EVERY + 1, 2 * EVERY)
    code, out, _ = run(tmp_path, moment="step", step=at, signal="SIGTERM")
    assert code == RETRY and "starting from scratch\n" in out
    assert f"SIGTERM received: saved step {at + 1} to {tmp_path}; rerun the command to resume\n" in out
    assert f"RETURNED step {at + 1}, stopped True" in out and saved_steps(tmp_path)[-1] == at + 1
    assert (tmp_path / "export.safetensors").exists()

    later = RANDOM.randrange(at + 2, STEPS)
    code, out, _ = run(tmp_path, moment="step", step=later, signal="SIGKILL")
    assert code == -signal.SIGKILL and f"resuming from the checkpoint of step {at + 1}\n" in out
    last = saved_steps(tmp_path)[-1]
    assert at + 1 <= last <= later

    code, out, _ = run(tmp_path, moment="step", step=last + 1, signal="SIGINT")
    assert code == RETRY and f"resuming from the checkpoint of step {last}\n" in out
    assert f"SIGINT received: saved step {last + 2} to {tmp_path}" in out and saved_steps(tmp_path)[-1] == last + 2

    code, out, _ = run(tmp_path)
    assert code == 0 and f"resuming from the checkpoint of step {last + 2}\n" in out
    assert_like(tmp_path, straight[0])


@methods("consistency", "diffusion", flow_map="scm")
def test_every_other_method_goes_on_where_it_was_killed(method, tmp_path):
    """Killed after the second save began, so that the first is whole; then left alone."""
    straight, workdir = tmp_path / "straight", tmp_path / "ended"
    quick = " ".join(flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag)
    order = {"method": method, "environment": {"XLA_FLAGS": quick}}  # compiles sooner
    undisturbed = start(straight, **order)  # beside the others
    try:
        code, out, err = run(workdir, **order, moment="step", step=2 * EVERY + 1, signal="SIGKILL")
        assert code == -signal.SIGKILL and "resuming" not in out, err
        last = saved_steps(workdir)[-1]
        assert last in (EVERY, 2 * EVERY)
        code, out, err = run(workdir, **order)
        assert code == 0 and f"resuming from the checkpoint of step {last}\n" in out, err
        code, _, err = finish(undisturbed)
        assert code == 0, err
    finally:
        undisturbed.kill()
    assert_like(workdir, straight, method)


def test_kill_9_in_the_middle_of_a_save(straight, tmp_path):
    for moment in ("save_begun", "save_written"):
        code, out, err = run(tmp_path, moment=moment, step=2 * EVERY, signal="SIGKILL")
        assert code == -signal.SIGKILL, err
        assert saved_steps(tmp_path) == [EVERY]
        assert [p.name for p in (tmp_path / "checkpoints").glob("*tmp*")] == [f"{2 * EVERY}.orbax-checkpoint-tmp"]
    assert f"resuming from the checkpoint of step {EVERY}\n" in out
    assert run(tmp_path)[0] == 0
    assert_like(tmp_path, straight[0])


def test_rerunning_a_finished_run_changes_nothing(straight, tmp_path):
    workdir = shutil.copytree(straight[0], tmp_path / "again")
    code, out, err = run(workdir)
    assert code == 0, err
    assert f"done: {STEPS} steps" in out
    assert_like(workdir, straight[0])


def test_stop_during_evaluation(tmp_path):
    changes = {"train.eval_every": EVERY, "eval.samples": 16 * 1000}
    process = start(tmp_path, moment="evaluate", changes=changes)
    wait_for(process, "EVALUATING")
    process.send_signal(signal.SIGTERM)
    code, out, err = finish(process)
    assert code == RETRY, err
    assert f"SIGTERM received: saved step {EVERY} to {tmp_path}" in out
    assert saved_steps(tmp_path) == [EVERY] and not (tmp_path / "evaluations.jsonl").exists()


def test_stop_during_compilation(tmp_path):
    process = start(tmp_path, moment="compile")
    wait_for(process, "COMPILING")
    process.send_signal(signal.SIGTERM)
    code, out, err = finish(process)
    assert code == RETRY, err
    assert "SIGTERM during compilation: nothing new to save, stopping\n" in out
    assert saved_steps(tmp_path) == [] and not list(tmp_path.rglob("*tmp*")) and not list(tmp_path.rglob("*.part"))


def test_a_disk_that_fills_up(tmp_path):
    """Real writes that fail: the message names the step and what is safe, and with space again the run resumes."""
    wide = {"model.fields.width": 64}
    code, _, err = run(tmp_path, moment="full_disk", step=2 * EVERY, changes=wide)
    assert code == 1
    message = err[err.rindex("CheckpointError") :]
    assert f"CheckpointError: could not write the checkpoint of step {2 * EVERY} to {tmp_path}/checkpoints" in message
    assert f"the checkpoint of step {EVERY} is complete; free some space" in message
    assert saved_steps(tmp_path) == [EVERY]
    code, out, err = run(tmp_path, changes=wide)
    assert code == 0, err
    assert f"resuming from the checkpoint of step {EVERY}\n" in out and saved_steps(tmp_path)[-1] == STEPS


def test_what_a_run_writes(straight):
    workdir, out, err = straight
    assert "FOREIGN []" in out
    assert re.search(
        r"3,394 parameters; per device: params/student .* MiB, opt_state/student .* MiB, ema .* MiB; mesh data 1", out
    )
    assert re.search(r"compiled the training step in \d+\.\d s", out)
    assert re.search(rf"step {STEPS - 1}: loss [\d.e+-]+, [\d.e+-]+ steps/s, \d+ s left, ", out)
    assert "\r" not in err and "step/s" not in err  # no progress bar: this is not a terminal
    assert all({"time", "step"} <= set(line) for line in lines(workdir))
    assert list((workdir / "tensorboard").glob("events.out.tfevents.*"))
    config = json.loads((workdir / "config.json").read_text())
    assert config["train"]["steps"] == STEPS and config["format"] == 2


def test_no_other_framework_is_imported(tmp_path):
    """Not even where they are installed: a run with evaluations and grids, beside decoys of their names."""
    for name in ("torch", "tensorflow", "keras"):
        (tmp_path / "decoys" / name).mkdir(parents=True)
        (tmp_path / "decoys" / name / "__init__.py").touch()
    decoys = {"PYTHONPATH": str(tmp_path / "decoys"), "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    quick = {"train.steps": 2, "train.eval_every": 1, "eval.net": "digits", "eval.samples": 16, "eval.reference": 32}
    code, out, err = run(tmp_path / "run", environment=decoys, images=True, changes=quick)
    assert code == 0, err
    assert "FOREIGN []" in out
    assert [line["step"] for line in lines(tmp_path / "run", "evaluations.jsonl")] == [1, 2]
    assert [p.name for p in (tmp_path / "run" / "samples").iterdir()] == ["samples_00000002.png"]
