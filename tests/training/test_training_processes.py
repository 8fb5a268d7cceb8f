"""Real processes on loopback, two simulated devices each: the losses of one process, and every way to end together."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from training_runs import config_of, finish, lines, losses, points_of, saved_steps, start, wait_for

from jaxdiff.training import distributed, train
from jaxdiff.training.distributed import RETRY
from jaxdiff.training.peers import REFUSED

SPLIT = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.min_size": 64, "data.batch_size": 16}
SILENCE = 60  # seconds without a heartbeat after which JAX takes a process for dead
STARVED = 120  # seconds that a busy machine may take to end a process that knows it must
DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def pair(workdir, second=None, other=None, **order):
    """Both processes of a run; `second` are changes that only the second gets, `other` is its own workdir."""
    order = {"port": free_port(), "silence": SILENCE, "environment": DEVICES, **order}
    changes = [order.pop("changes", {}), second or {}]
    folders = [workdir, other or workdir]
    return [start(folders[i], process=i, changes={**changes[0], **(changes[1] if i else {})}, **order) for i in (0, 1)]


def both(workdir, **order):
    """Exit code, stdout and stderr of both, run to their end."""
    processes = pair(workdir, **order)
    try:
        return [finish(process, 600) for process in processes]
    finally:
        for process in processes:
            process.kill()


def alone(workdir, method, changes):
    """The same run in one process with as many devices."""
    return train(config_of(points_of(method), changes), workdir, quiet=True, devices=jax.devices()[:4])


def assert_same_losses(one, other, steps):
    found, wanted = losses(one), losses(other)
    assert list(found) == list(wanted) == list(range(1, steps + 1))
    np.testing.assert_allclose(list(found.values()), list(wanted.values()), rtol=1e-5)


def test_one_of_two_is_stopped_and_one_process_resumes(tmp_path):
    """Both save at the same step; what follows, in one process, are the losses of a run that was never two."""
    changes = {**SPLIT, "train.steps": 120, "train.save_every": 1000}
    processes = pair(tmp_path / "two", moment="slow", changes=changes)
    try:
        wait_for(processes[0], "step 3:")
        processes[1].send_signal(signal.SIGTERM)
        results = [finish(process) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [code for code, _, _ in results] == [RETRY, RETRY], results
    (step,) = saved_steps(tmp_path / "two")
    assert 3 < step < 120 and all(f"RETURNED step {step}, stopped True" in out for _, out, _ in results)
    assert f"received: saved step {step} to {tmp_path / 'two'}" in results[0][1]
    assert alone(tmp_path / "two", "diffusion", changes).step == 120
    alone(tmp_path / "one", "diffusion", changes)
    assert_same_losses(tmp_path / "two", tmp_path / "one", 120)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["diffusion", "sfd", "emd"])
def test_two_processes_have_the_losses_of_one(tmp_path, method):
    changes = {**SPLIT, "train.steps": 8, "train.eval_every": 4, "eval.samples": 20}
    results = both(tmp_path / "two", method=method, changes=changes)
    assert [code for code, _, _ in results] == [0, 0], results
    alone(tmp_path / "one", method, changes)
    assert_same_losses(tmp_path / "two", tmp_path / "one", 8)
    records = [lines(tmp_path / name, "evaluations.jsonl") for name in ("two", "one")]
    distances = [[record["sliced_wasserstein"] for record in found] for found in records]
    assert len(distances[0]) == 2
    np.testing.assert_allclose(distances[0], distances[1], rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_killed_ends_the_other(tmp_path, victim):
    """Within the bound and with a message; started again, the two end as if nothing had been, to the bit."""
    changes = {**SPLIT, "train.steps": 40, "train.save_every": 10}
    results = both(tmp_path / "straight", changes=changes)
    assert [code for code, _, _ in results] == [0, 0], results
    processes = pair(tmp_path / "ended", moment="slow", pause=1.0, changes=changes)  # for a parent that is late
    try:
        wait_for(processes[0], "step 15:")
        processes[victim].kill()
        begun = time.monotonic()
        assert finish(processes[victim])[0] == -signal.SIGKILL
        code, _, err = finish(processes[1 - victim], 2 * SILENCE + STARVED)  # a failed collective shows it at once
        print(f"the other ended after {time.monotonic() - begun:.1f} s")
    finally:
        for process in processes:
            process.kill()
    assert code == RETRY, err
    assert "another process was lost" in err
    assert saved_steps(tmp_path / "ended")[-1] in (10, 20, 30)
    results = both(tmp_path / "ended", changes=changes)
    assert [code for code, _, _ in results] == [0, 0], results
    assert losses(tmp_path / "ended") == losses(tmp_path / "straight")
    ended, straight = (tmp_path / name / "export.safetensors" for name in ("ended", "straight"))
    assert ended.read_bytes() == straight.read_bytes()


@pytest.mark.slow
def test_processes_that_differ_do_not_start(tmp_path):
    results = both(tmp_path, changes=SPLIT, second={"seed": 1})
    for code, _, err in results:
        assert code == REFUSED, results
        assert re.search(r"processes of a run differ: config is \w+ on process 0, \w+ on process 1", err)
    assert not (tmp_path / "checkpoints").exists()


def test_workdirs_that_are_not_shared_are_refused(tmp_path):
    """Each process would write its part of a checkpoint to a disk of its own, and the whole would be nowhere."""
    results = both(tmp_path / "here", other=tmp_path / "there", changes={**SPLIT, "train.steps": 4})
    for code, out, err in results:
        assert code == REFUSED, (out, err)
        assert "here is not shared: a file that process 0 wrote there cannot be seen by process 1" in err
        assert "Traceback" not in err and "stack trace" not in err
    left = [path.name for folder in ("here", "there") for path in (tmp_path / folder).iterdir()]
    assert set(left) <= {"batches.jsonl"}


@pytest.mark.slow
def test_a_full_disk_of_one_ends_both_with_code_2(tmp_path):
    """A launcher must not retry it; and nobody prints a C++ stack."""
    wide = {**SPLIT, "mesh.min_size": 2**20, "train.save_every": 2, "model.fields.width": 64}
    results = both(tmp_path, moment="full_disk", step=4, changes=wide)
    assert [code for code, _, _ in results] == [REFUSED, REFUSED], results
    assert all("could not write the checkpoint of step 4" in err for _, _, err in results)
    assert all("stack trace" not in err for _, _, err in results)
    assert saved_steps(tmp_path) == [2]
    assert [code for code, _, _ in both(tmp_path, changes=wide)] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("stuck", [0, 1])
def test_a_process_that_is_stuck_ends_both_to_be_restarted(tmp_path, stuck):
    """It is alive, so JAX's heartbeat sees nothing."""
    changes = {**SPLIT, "train.save_every": 3}
    results = both(tmp_path, moment="stuck", step=5, stuck=stuck, stall_timeout=8.0, changes=changes)
    assert [code for code, _, _ in results] == [RETRY, RETRY], results
    assert any("no progress for 8 s in training steps" in err for _, _, err in results)
    assert saved_steps(tmp_path) == [3]
    assert [code for code, _, _ in both(tmp_path, changes=changes)] == [0, 0]


def test_processes_that_see_different_checkpoints(monkeypatch):
    monkeypatch.setattr(distributed, "gather", lambda text: [text, "7", text])
    with pytest.raises(ValueError, match="step 10 on process 0, 2, step 7 on process 1; the disk must be shared"):
        distributed.same_step(10, Path("run"))
    assert distributed.same_step(7, Path("run")) == 7


# ------------------------------------------------------------------------------------ launchers


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, None),
        ({"SLURM_NTASKS": "1"}, None),
        ({"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}, ("h:1", 4, 3)),
    ],
)
def test_a_place_by_variables(environment, found):
    place = distributed.find(environment=environment)
    assert (place and (place.coordinator, place.processes, place.process)) == found


def test_a_place_by_slurm(monkeypatch):
    slurm = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NODELIST": "node[3-4]",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "0",
    }
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    place = distributed.find()
    assert place.address[0] == "node3" and (place.processes, place.process, list(place.local_devices)) == (2, 1, [0])
    assert distributed.launched_by({"TPU_WORKER_HOSTNAMES": "a,b"}) == "Cloud TPU"
    assert distributed.launched_by({"OMPI_COMM_WORLD_SIZE": "2"}) == "Open MPI"
    assert distributed.launched_by({"KUBERNETES_SERVICE_HOST": "x", "JOB_COMPLETION_INDEX": "0"}) == "Kubernetes"


MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({**MPI, "OMPI_MCA_orte_hnp_uri": "8192.0;tcp://10.0.0.1,10.0.0.2:34911"}, ("10.0.0.1:61442", 2, 1)),
        ({**MPI, "OMPI_MCA_orte_hnp_uri": "4096.0;tcp6://[fe80::b9b,2620::2]:43370"}, ("[fe80::b9b]:61441", 2, 1)),
        (MPI, None),
        ({"TPU_WORKER_HOSTNAMES": "a,b,c", "TPU_WORKER_ID": "2"}, ("a:8482", 3, 2)),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "0", "MEGASCALE_NUM_SLICES": "2"}, None),
        ({"KUBERNETES_SERVICE_HOST": "x", "JOB_COMPLETION_INDEX": "0"}, None),
    ],
)
def test_a_place_by_other_launchers(environment, found):
    place = distributed.find(environment=environment)
    assert (place and (place.coordinator, place.processes, place.process)) == found


def test_half_a_place_is_an_error():
    code = "from jaxdiff.training import distributed; distributed.connect(detect=True)"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert child.returncode == 1
    assert "JAX cannot detect the processes started by this machine" in child.stderr
    with pytest.raises(ValueError, match="--coordinator=HOST:PORT of process 0, --processes=N and --process in"):
        distributed.find(processes=2, environment={})


def test_who_differs_is_named():
    config = config_of()
    same = distributed.identity(config.to_dict())
    assert same == distributed.identity(config_of().to_dict())
    other = distributed.identity(config_of(changes={"seed": 1}).to_dict())
    (line,) = distributed.differences([same, same, other, same])
    assert line == f"config is {same['config']} on process 0, 1, 3, {other['config']} on process 2"
    assert len(json.dumps(same)) < 1024 and distributed.differences([same, same]) == []
