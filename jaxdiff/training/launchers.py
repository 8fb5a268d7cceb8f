"""The processes of a run, from flags or from the variables that launchers set. Nothing is contacted here.

Known are JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, Slurm, Open MPI, and TPU slices on GKE.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping

# the variable in which each launcher sets the number of processes
TASKS = {"Slurm": "SLURM_NTASKS", "Open MPI": "OMPI_COMM_WORLD_SIZE"}


class ProcessSpec:
    """The address of process 0, the number of processes, and the index of this one.

    `bind` is where process 0 listens: at its address if that is numeric, else ("") on all interfaces, since a host's
    own name often resolves to its loopback.
    """

    def __init__(self, coordinator: str, processes: int, process: int, local_devices: list[int] | None = None) -> None:
        host, _, port = coordinator.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or not port.isdigit() or not 0 < int(port) < 2**16 or not 0 <= process < processes:
            raise ValueError(
                "multiple processes need --coordinator=HOST:PORT of process 0, --processes=N and --process in [0, N); "
                f"got {coordinator!r}, {processes} and {process}"
            )
        self.address = (host, int(port))
        self.coordinator = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.bind = host if _is_numeric(host) else ""
        self.processes, self.process, self.local_devices = processes, process, local_devices


def _is_numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def find(
    coordinator: str = "",
    processes: int = 0,
    process: int = -1,
    environment: Mapping[str, str] = os.environ,
) -> ProcessSpec | None:
    """This process's spec from flags and variables; None for a single process, or if only JAX can detect it."""
    coordinator = coordinator or environment.get("JAX_COORDINATOR_ADDRESS", "")
    processes = processes or _integer(environment, "JAX_NUM_PROCESSES", 0)
    process = process if process >= 0 else _integer(environment, "JAX_PROCESS_ID", -1)
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


def launched_by(environment: Mapping[str, str] = os.environ) -> str:
    """The launcher that started this process along with others, or ""."""
    for name, variable in TASKS.items():
        if _integer(environment, variable, 1) > 1:
            return name
    if "," in environment.get("TPU_WORKER_HOSTNAMES", "") or "," in environment.get("TPU_PROCESS_ADDRESSES", ""):
        return "Cloud TPU"
    if "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment:
        return "Kubernetes"
    return ""


def _integer(environment: Mapping[str, str], name: str, default: int) -> int:
    """An integer variable; an empty one counts as not set."""
    text = environment.get(name, "").strip()
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"the environment variable {name} must be an integer, got {text!r}; set or unset it") from None


def _slurm(environment: Mapping[str, str]) -> ProcessSpec | None:
    """From the variables that srun sets: process 0 is on the first node of the step, each process has one GPU."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
    if any(name not in environment for name in names):
        return None
    nodes = environment["SLURM_STEP_NODELIST"]
    job, processes, process, local = (_integer(environment, name, 0) for name in names if name != "SLURM_STEP_NODELIST")
    first = re.match(r"([^,\[]+)(?:\[([^,\-\]]+))?", nodes)  # node3 of node3, node3,other and node[3-4,7],other
    if first is None:
        return None
    host = first[1] + (first[2] or "")
    return ProcessSpec(f"{host}:{_port(job, environment)}", processes, process, [local])


def _open_mpi(environment: Mapping[str, str]) -> ProcessSpec | None:
    """From the variables of mpirun up to version 4: process 0 is where mpirun was called. Later ones set no host."""
    address = re.match(
        r"(\d+)\.\d+;(?:tcp://([^,:]+)|tcp6://\[([^,\]]+))", environment.get("OMPI_MCA_orte_hnp_uri", "")
    )
    names = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
    if address is None or any(name not in environment for name in names):
        return None
    processes, process, local = (_integer(environment, name, 0) for name in names)
    job = int(address[1]) // 2**12  # job ids are multiples of it
    return ProcessSpec(f"{address[2] or address[3]}:{_port(job, environment)}", processes, process, [local])


def _tpu_slice(environment: Mapping[str, str]) -> ProcessSpec | None:
    """From the variables of a TPU slice on GKE. Multislice jobs are left to JAX."""
    hosts = environment.get("TPU_WORKER_HOSTNAMES", "").split(",")
    several = _integer(environment, "MEGASCALE_NUM_SLICES", 1) > 1
    if len(hosts) < 2 or several or "TPU_WORKER_ID" not in environment:
        return None
    port = environment.get("JAX_COORDINATOR_PORT", "8482")
    return ProcessSpec(f"{hosts[0]}:{port}", len(hosts), _integer(environment, "TPU_WORKER_ID", 0))


def _port(job: int, environment: Mapping[str, str]) -> str:
    """A port that all processes of a job agree on, among the last 4,096."""
    return environment.get("JAX_COORDINATOR_PORT") or str(65536 - 2**12 + job % 2**12)


LAUNCHERS = {"Slurm": _slurm, "Open MPI": _open_mpi, "Cloud TPU": _tpu_slice}
