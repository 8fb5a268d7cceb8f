"""Several processes become one run, before any device is asked for.

`connect` finds the other processes by flags, by the variables JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
JAX_PROCESS_ID, or as JAX does on Cloud TPU, Slurm, Open MPI and Kubernetes. A roll call comes before JAX's own start,
which ends the process without naming anybody when somebody is late. `agree` compares what all of them are about to run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

RETRY = 75  # exit code of a run that was stopped and shall be started again (EX_TEMPFAIL): launchers look for it
CAUSES = (
    "usual causes: the command was not started on every host, hosts cannot reach that port (firewall, other network), "
    "a process failed while importing (look at its log), or two processes were given the same number"
)
# words of the errors in which a lost process shows: of collectives, of gRPC, of JAX's coordination service
LOST = ("Gloo", "Connection closed by peer", "Connection reset", "UNAVAILABLE", "DEADLINE_EXCEEDED", "heartbeat")
# what tells that a launcher started more than one process, and how many
TASKS = {"Slurm": "SLURM_NTASKS", "Open MPI": "OMPI_COMM_WORLD_SIZE"}


class Place:
    """Where a process stands: the address of process 0, how many there are, and which one it is."""

    def __init__(self, coordinator: str, processes: int, process: int, local_devices: Any = None) -> None:
        host, _, port = coordinator.rpartition(":")
        if not host or not port.isdigit() or not 0 <= process < processes:
            raise ValueError(
                "a process needs --coordinator=HOST:PORT of process 0, --processes=N and --process in [0, N); got "
                f"{coordinator!r}, {processes} and {process}"
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
    """Join the other processes, or return at once when there are none.

    All must arrive within `timeout` seconds. Later a process that is not heard of for `silence` seconds ends the run.
    """
    place = find(coordinator, processes, process, detect)
    if place is None or place.processes == 1:
        return
    roll_call(place, timeout)
    jax.distributed.initialize(
        place.coordinator,
        place.processes,
        place.process,
        place.local_devices,
        initialization_timeout=max(60, timeout),
        heartbeat_timeout_seconds=silence,
        shutdown_timeout_seconds=silence,
    )
    _say(place, f"all {place.processes} processes are connected")


def find(
    coordinator: str = "",
    processes: int = 0,
    process: int = -1,
    detect: bool = False,
    environment: Mapping[str, str] = os.environ,
) -> Place | None:
    """This process's place by flags, variables or the cluster it runs in; None for a process alone.

    `detect` asks JAX even where no variable tells of other processes, as on the virtual machines of a TPU slice.
    """
    coordinator = coordinator or environment.get("JAX_COORDINATOR_ADDRESS", "")
    processes = processes or int(environment.get("JAX_NUM_PROCESSES", 0))
    process = process if process >= 0 else int(environment.get("JAX_PROCESS_ID", -1))
    if coordinator and processes and process >= 0:
        return Place(coordinator, processes, process)
    cluster = launched_by(environment) or ("this machine" if detect else "")
    if not cluster:
        if coordinator or processes > 1 or process >= 0:
            Place(coordinator, processes, process)  # says what is missing
        return None
    from jax._src.clusters import ClusterEnv  # JAX tells this nowhere else before it connects

    found = ClusterEnv.auto_detect_unset_distributed_params(
        coordinator or None, processes or None, process if process >= 0 else None, None, None, 300
    )
    if None in found[:3]:
        raise ValueError(
            f"JAX cannot tell which process this is of those that {cluster} started (Kubernetes needs pip install "
            "'jax[k8s]'); give --coordinator=HOST:PORT --processes=N --process=I"
        )
    return Place(str(found[0]), int(found[1] or 0), int(found[2] or 0), found[3])


def launched_by(environment: Mapping[str, str] = os.environ) -> str:
    """The launcher that started this process beside others, or nothing."""
    for name, variable in TASKS.items():
        if int(environment.get(variable, 1)) > 1:
            return name
    if "," in environment.get("TPU_WORKER_HOSTNAMES", "") or "," in environment.get("TPU_PROCESS_ADDRESSES", ""):
        return "Cloud TPU"
    if "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment:
        return "Kubernetes"
    return ""


# ------------------------------------------------------------------------------------------ the roll call


def roll_call(place: Place, timeout: float) -> None:
    """Return when all processes are there; else name those that are not. Uses the port JAX will use afterwards."""
    deadline = time.monotonic() + timeout
    if place.process:
        _report_in(place, deadline, timeout)
        return
    waiting = set(range(1, place.processes))
    _say(place, f"at {place.coordinator}, waiting up to {timeout:.0f} s for processes {_names(waiting)}")
    present: list[socket.socket] = []
    with _listening(place) as server:
        while waiting and time.monotonic() < deadline:
            server.settimeout(min(10.0, max(0.01, deadline - time.monotonic())))
            try:
                caller, _ = server.accept()
                caller.settimeout(10)
                waiting.discard(int(caller.makefile().readline()))
                present.append(caller)
            except TimeoutError:
                _say(place, f"still waiting for processes {_names(waiting)}")
            except (OSError, ValueError):
                continue  # a stranger, or a process that went away; it will call again
    for caller in present:
        with contextlib.suppress(OSError), caller:
            caller.sendall(f"{json.dumps(sorted(waiting))}\n".encode())
            caller.recv(1)  # its end closes first, which leaves the port free
    if waiting:
        raise TimeoutError(_late(waiting, place, timeout))


def _report_in(place: Place, deadline: float, timeout: float) -> None:
    _say(place, f"waiting up to {timeout:.0f} s for process 0 at {place.coordinator}")
    while time.monotonic() < deadline:
        missing = _call(place, deadline)
        if missing:
            raise TimeoutError(_late(missing, place, timeout))
        if missing is not None:
            return
        time.sleep(0.2)
    raise TimeoutError(_late({0}, place, timeout))


def _call(place: Place, deadline: float) -> set[int] | None:
    """Tell process 0 that this one is there; its answer is who is missing, None if it is not there itself."""
    try:
        with socket.create_connection(place.address, timeout=5) as call:
            call.sendall(f"{place.process}\n".encode())
            call.settimeout(max(1.0, deadline - time.monotonic()) + 30)  # process 0 may have come later
            return set(json.loads(call.makefile().readline()))
    except (OSError, ValueError):
        return None


@contextlib.contextmanager
def _listening(place: Place) -> Iterator[socket.socket]:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", place.address[1]))
        except OSError as error:
            raise OSError(
                f"process 0 cannot listen at port {place.address[1]}: {error}. If an earlier run still holds it, end "
                "that run; else choose another port in --coordinator"
            ) from error
        server.listen(place.processes)
        yield server


def _late(waiting: set[int], place: Place, timeout: float) -> str:
    return (
        f"process {place.process} of {place.processes}: after {timeout:.0f} s {_names(waiting)} of "
        f"0..{place.processes - 1} did not come to {place.coordinator}; {CAUSES}"
    )


def _names(processes: set[int]) -> str:
    shown = sorted(processes)
    return ", ".join(map(str, shown[:16])) + (f" and {len(shown) - 16} more" if len(shown) > 16 else "")


def _say(place: Place, text: str) -> None:
    print(f"process {place.process} of {place.processes}: {text}", flush=True)


@contextlib.contextmanager
def together() -> Iterator[None]:
    """A peer that is lost ends this process too, at once and with the exit code for another try.

    What notices is a collective that fails, or JAX's heartbeat, which ends the process by itself.
    """
    try:
        yield
    except Exception as error:  # a failed collective comes as one of several types, known by its words
        if jax.process_count() == 1 or not any(word in str(error) for word in LOST):
            raise
        print(
            f"process {jax.process_index()} of {jax.process_count()}: another process is lost or cannot be reached "
            f"({str(error).splitlines()[0][:200]}). Start the same command on all of them again: it goes on from the "
            "last complete checkpoint",
            file=sys.stderr,
            flush=True,
        )
        os._exit(RETRY)  # an orderly exit would wait for the others


# ------------------------------------------------------------------------------------------ agreement


def agree(config: Mapping[str, Any]) -> None:
    """Every process runs the same config and code on the same kind of device; else who differs is named."""
    if jax.process_count() == 1:
        return
    text = json.dumps(identity(config)).encode()
    padded = np.zeros(1024, np.uint8)
    padded[: len(text)] = np.frombuffer(text, np.uint8)
    everyone = [json.loads(bytes(row).rstrip(b"\0")) for row in multihost_utils.process_allgather(padded)]
    wrong = differences(everyone)
    if wrong:
        raise ValueError(f"the processes of a run must be alike: {'; '.join(wrong)}")


def identity(config: Mapping[str, Any]) -> dict[str, str]:
    """What must be the same everywhere, each as a short text."""
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
    """Of each thing that is not the same everywhere, who has what."""
    found = []
    for name in everyone[0]:
        groups: dict[str, set[int]] = {}
        for process, one in enumerate(everyone):
            groups.setdefault(one[name], set()).add(process)
        if len(groups) > 1:
            parts = ", ".join(f"{value} on process {_names(who)}" for value, who in groups.items())
            found.append(f"{name} is {parts}")
    return found
