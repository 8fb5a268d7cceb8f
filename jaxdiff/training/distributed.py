"""Joins several processes into one run, before any device is used.

`connect` finds the other processes from flags, from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, or
from the variables of Slurm, Open MPI and TPU slices on GKE. A rendezvous precedes jax.distributed.initialize, which
would abort a late process without naming it. Where only JAX can find the processes (Cloud TPU metadata, the Kubernetes
API), there is no rendezvous. `agree` checks that all processes are about to run the same thing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

RETRY = 75  # exit code of an interrupted run that should be restarted (EX_TEMPFAIL), for launchers
CAUSES = (
    "usual causes: the command was not started on every host, hosts cannot reach that port (firewall, other network), "
    "a process failed while importing (check its log), or two processes have the same --process"
)
# error texts that indicate a lost process: from collectives, gRPC, JAX's coordination service
LOST = ("Gloo", "Connection closed by peer", "Connection reset", "UNAVAILABLE", "DEADLINE_EXCEEDED", "heartbeat")
# the variable in which each launcher sets the number of processes
TASKS = {"Slurm": "SLURM_NTASKS", "Open MPI": "OMPI_COMM_WORLD_SIZE"}


class ProcessSpec:
    """The address of process 0, the number of processes, and the index of this one."""

    def __init__(self, coordinator: str, processes: int, process: int, local_devices: list[int] | None = None) -> None:
        host, _, port = coordinator.rpartition(":")
        if not host or not port.isdigit() or not 0 <= process < processes:
            raise ValueError(
                "multiple processes need --coordinator=HOST:PORT of process 0, --processes=N and --process in [0, N); "
                f"got {coordinator!r}, {processes} and {process}"
            )
        self.address, self.coordinator = (host, int(port)), coordinator
        self.processes, self.process, self.local_devices = processes, process, local_devices


def connect(
    coordinator: str = "",
    processes: int = 0,
    process: int = -1,
    *,
    detect: bool = False,
    timeout: int = 300,
    silence: int = 60,
) -> None:
    """Join the other processes; return at once if there are none.

    All must connect within `timeout` seconds. Later, a process that is silent for `silence` seconds ends the run.
    """
    spec = find(coordinator, processes, process)
    if spec is None:
        cluster = launched_by() or ("this machine" if detect else "")
        if cluster:
            _connect_by_jax(cluster, coordinator, processes, process, timeout, silence)
        return
    if spec.processes == 1:
        return
    rendezvous(spec, timeout)
    jax.distributed.initialize(
        spec.coordinator,
        spec.processes,
        spec.process,
        spec.local_devices,
        initialization_timeout=max(60, timeout),
        heartbeat_timeout_seconds=silence,
        shutdown_timeout_seconds=silence,
    )
    _say(spec, f"all {spec.processes} processes are connected")


def _connect_by_jax(cluster: str, coordinator: str, processes: int, process: int, timeout: int, silence: int) -> None:
    """Let JAX detect the processes, without flags or known variables."""
    try:
        jax.distributed.initialize(
            coordinator or None,
            processes or None,
            process if process >= 0 else None,
            initialization_timeout=max(60, timeout),
            heartbeat_timeout_seconds=silence,
            shutdown_timeout_seconds=silence,
        )
    except ValueError as error:
        raise ValueError(
            f"JAX cannot detect the processes started by {cluster} (Kubernetes needs pip install "
            "'jax[k8s]'); pass --coordinator=HOST:PORT --processes=N --process=I"
        ) from error


def find(
    coordinator: str = "",
    processes: int = 0,
    process: int = -1,
    environment: Mapping[str, str] = os.environ,
) -> ProcessSpec | None:
    """This process's spec from flags and variables; None for a single process, or if only JAX can detect it."""
    coordinator = coordinator or environment.get("JAX_COORDINATOR_ADDRESS", "")
    processes = processes or int(environment.get("JAX_NUM_PROCESSES", 0))
    process = process if process >= 0 else int(environment.get("JAX_PROCESS_ID", -1))
    if coordinator and processes and process >= 0:
        return ProcessSpec(coordinator, processes, process)
    cluster = launched_by(environment)
    if not cluster:
        if coordinator or processes > 1 or process >= 0:
            ProcessSpec(coordinator, processes, process)  # raises an error that says what is missing
        return None
    found = LAUNCHERS[cluster](environment) if cluster in LAUNCHERS else None
    if found is None:
        return None
    return ProcessSpec(
        coordinator or found.coordinator,
        processes or found.processes,
        process if process >= 0 else found.process,
        found.local_devices,
    )


def _slurm(environment: Mapping[str, str]) -> ProcessSpec | None:
    """From the variables that srun sets: process 0 is on the first node of the step, each process has one GPU."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
    if any(name not in environment for name in names):
        return None
    job, nodes, processes, process, local = (environment[name] for name in names)
    first = re.match(r"([^,\[]+)(?:\[([^,\-\]]+))?", nodes)  # node3 of node3, node3,other and node[3-4,7],other
    if first is None:
        return None
    host = first[1] + (first[2] or "")
    return ProcessSpec(f"{host}:{_port(job, environment)}", int(processes), int(process), [int(local)])


def _open_mpi(environment: Mapping[str, str]) -> ProcessSpec | None:
    """From the variables of mpirun up to version 4: process 0 is where mpirun was called. Later ones set no host."""
    address = re.match(
        r"(\d+)\.\d+;(?:tcp://([^,:]+)|tcp6://\[([^,\]]+))", environment.get("OMPI_MCA_orte_hnp_uri", "")
    )
    names = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
    if address is None or any(name not in environment for name in names):
        return None
    processes, process, local = (int(environment[name]) for name in names)
    job = str(int(address[1]) // 2**12)  # job ids are multiples of it
    return ProcessSpec(f"{address[2] or address[3]}:{_port(job, environment)}", processes, process, [local])


def _tpu_slice(environment: Mapping[str, str]) -> ProcessSpec | None:
    """From the variables of a TPU slice on GKE. Multislice jobs are left to JAX."""
    hosts = environment.get("TPU_WORKER_HOSTNAMES", "").split(",")
    several = int(environment.get("MEGASCALE_NUM_SLICES", 1)) > 1
    if len(hosts) < 2 or several or "TPU_WORKER_ID" not in environment:
        return None
    port = environment.get("JAX_COORDINATOR_PORT", "8482")
    return ProcessSpec(f"{hosts[0]}:{port}", len(hosts), int(environment["TPU_WORKER_ID"]))


def _port(job: str, environment: Mapping[str, str]) -> str:
    """A port that all processes of a job agree on, among the last 4,096."""
    return environment.get("JAX_COORDINATOR_PORT") or str(65536 - 2**12 + int(job) % 2**12)


LAUNCHERS = {"Slurm": _slurm, "Open MPI": _open_mpi, "Cloud TPU": _tpu_slice}


def launched_by(environment: Mapping[str, str] = os.environ) -> str:
    """The launcher that started this process along with others, or ""."""
    for name, variable in TASKS.items():
        if int(environment.get(variable, 1)) > 1:
            return name
    if "," in environment.get("TPU_WORKER_HOSTNAMES", "") or "," in environment.get("TPU_PROCESS_ADDRESSES", ""):
        return "Cloud TPU"
    if "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment:
        return "Kubernetes"
    return ""


# ------------------------------------------------------------------------------------------ rendezvous


def rendezvous(spec: ProcessSpec, timeout: float) -> None:
    """Wait for all processes, or name those that are missing. Uses the port that JAX will use afterwards."""
    deadline = time.monotonic() + timeout
    if spec.process:
        _report_in(spec, deadline, timeout)
        return
    waiting = set(range(1, spec.processes))
    _say(spec, f"at {spec.coordinator}, waiting up to {timeout:.0f} s for processes {_names(waiting)}")
    present: list[socket.socket] = []
    with _listening(spec) as server:
        while waiting and time.monotonic() < deadline:
            server.settimeout(min(10.0, max(0.01, deadline - time.monotonic())))
            try:
                caller, _ = server.accept()
                caller.settimeout(10)
                waiting.discard(int(caller.makefile().readline()))
                present.append(caller)
            except TimeoutError:
                _say(spec, f"still waiting for processes {_names(waiting)}")
            except (OSError, ValueError):
                continue  # not one of ours, or a lost connection, which will be retried
    for caller in present:
        with contextlib.suppress(OSError), caller:
            caller.sendall(f"{json.dumps(sorted(waiting))}\n".encode())
            caller.recv(1)  # the other end closes first, which frees the port
    if waiting:
        raise TimeoutError(_late(waiting, spec, timeout))


def _report_in(spec: ProcessSpec, deadline: float, timeout: float) -> None:
    _say(spec, f"waiting up to {timeout:.0f} s for process 0 at {spec.coordinator}")
    while time.monotonic() < deadline:
        missing = _call(spec, deadline)
        if missing:
            raise TimeoutError(_late(missing, spec, timeout))
        if missing is not None:
            return
        time.sleep(0.2)
    raise TimeoutError(_late({0}, spec, timeout))


def _call(spec: ProcessSpec, deadline: float) -> set[int] | None:
    """Report to process 0; returns the missing processes, or None if process 0 cannot be reached."""
    try:
        with socket.create_connection(spec.address, timeout=5) as call:
            call.sendall(f"{spec.process}\n".encode())
            call.settimeout(max(1.0, deadline - time.monotonic()) + 30)  # process 0 may have started later
            return set(json.loads(call.makefile().readline()))
    except (OSError, ValueError):
        return None


@contextlib.contextmanager
def _listening(spec: ProcessSpec) -> Iterator[socket.socket]:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", spec.address[1]))
        except OSError as error:
            raise OSError(
                f"process 0 cannot listen on port {spec.address[1]}: {error}. If an earlier run still holds it, stop "
                "that run; otherwise choose another port in --coordinator"
            ) from error
        server.listen(spec.processes)
        yield server


def _late(waiting: set[int], spec: ProcessSpec, timeout: float) -> str:
    return (
        f"process {spec.process} of {spec.processes}: after {timeout:.0f} s, processes {_names(waiting)} of "
        f"0..{spec.processes - 1} did not reach {spec.coordinator}; {CAUSES}"
    )


def _names(processes: set[int]) -> str:
    shown = sorted(processes)
    return ", ".join(map(str, shown[:16])) + (f" and {len(shown) - 16} more" if len(shown) > 16 else "")


def _say(spec: ProcessSpec, text: str) -> None:
    print(f"process {spec.process} of {spec.processes}: {text}", flush=True)


@contextlib.contextmanager
def exit_on_lost_peer() -> Iterator[None]:
    """Exit immediately, with the exit code that asks for a restart, when another process is lost.

    A loss shows as a failing collective; JAX's heartbeat ends the process by itself.
    """
    try:
        yield
    except Exception as error:  # failed collectives have several types, recognised by their text
        if jax.process_count() == 1 or not any(word in str(error) for word in LOST):
            raise
        print(
            f"process {jax.process_index()} of {jax.process_count()}: another process was lost or cannot be reached "
            f"({str(error).splitlines()[0][:200]}). Rerun the command on all hosts to resume from the last complete "
            "checkpoint",
            file=sys.stderr,
            flush=True,
        )
        os._exit(RETRY)  # an orderly exit would wait for the others


# ------------------------------------------------------------------------------------------ agreement


def agree(config: Mapping[str, Any]) -> None:
    """Check that all processes run the same config and code on the same kind of device."""
    if jax.process_count() == 1:
        return
    text = json.dumps(identity(config)).encode()
    padded = np.zeros(1024, np.uint8)
    padded[: len(text)] = np.frombuffer(text, np.uint8)
    everyone = [json.loads(bytes(row).rstrip(b"\0")) for row in multihost_utils.process_allgather(padded)]
    wrong = differences(everyone)
    if wrong:
        raise ValueError(f"the processes of a run differ: {'; '.join(wrong)}")


def identity(config: Mapping[str, Any]) -> dict[str, str]:
    """What must be the same on all processes, as short strings."""
    package = Path(__file__).parents[1]
    code = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        code.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    settings = json.dumps(config, sort_keys=True, default=str).encode()
    return {
        "config": hashlib.sha256(settings).hexdigest()[:12],
        "code": code.hexdigest()[:12],
        "jax": jax.__version__,
        "device": jax.local_devices()[0].device_kind,
        "devices": str(jax.local_device_count()),
    }


def differences(everyone: list[dict[str, str]]) -> list[str]:
    """For each entry that differs, which processes have which value."""
    found = []
    for name in everyone[0]:
        groups: dict[str, set[int]] = {}
        for process, one in enumerate(everyone):
            groups.setdefault(one[name], set()).add(process)
        if len(groups) > 1:
            parts = ", ".join(f"{value} on process {_names(who)}" for value, who in groups.items())
            found.append(f"{name} is {parts}")
    return found
