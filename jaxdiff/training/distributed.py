"""Joins several processes into one run, before any device is used, and keeps them in agreement.

`connect` finds the other processes (`launchers`), meets them (`rendezvous`) and starts JAX's coordination service.
Where only JAX can find the processes (Cloud TPU metadata, the Kubernetes API), there is no rendezvous. `agree` checks
that all processes are about to run the same thing, `check_shared` that they see the same workdir, `same_step` that they
resume from the same checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxdiff.training.launchers import ProcessSpec, find, launched_by
from jaxdiff.training.peers import REFUSED, RETRY, ending_together, exit_on_abort, fail
from jaxdiff.training.rendezvous import Late, names, rendezvous, say, token_of

__all__ = [
    "REFUSED",
    "RETRY",
    "Late",
    "ProcessSpec",
    "ending_together",
    "fail",
    "find",
    "launched_by",
    "rendezvous",
    "token_of",
]

T = TypeVar("T")
TEXT = 4096  # bytes of a text that processes exchange
VISIBLE = 15.0  # seconds after which a file that one host wrote is visible to the others on a shared disk


def connect(
    coordinator: str = "",
    processes: int = 0,
    process: int = -1,
    *,
    config: Mapping[str, Any] | None = None,
    detect: bool = False,
    timeout: int = 300,
    silence: int = 60,
) -> None:
    """Join the other processes; return at once if there are none.

    All must connect within `timeout` seconds, with the same config. Later, a process that is silent for `silence`
    seconds ends the run.
    """
    spec = find(coordinator, processes, process)
    if spec is None:
        cluster = launched_by() or ("this machine" if detect else "")
        if cluster:
            exit_on_abort()
            _connect_by_jax(cluster, coordinator, processes, process, timeout, silence)
        return
    if spec.processes == 1:
        return
    rendezvous(spec, timeout, token_of(config or {}, spec.processes))
    exit_on_abort()
    try:
        jax.distributed.initialize(
            spec.coordinator,
            spec.processes,
            spec.process,
            spec.local_devices,
            initialization_timeout=max(60, timeout),
            heartbeat_timeout_seconds=silence,
            shutdown_timeout_seconds=silence,
            coordinator_bind_address=spec.coordinator if spec.bind else None,
        )
    except jax.errors.JaxRuntimeError as error:
        raise Late(
            f"process {spec.process} of {spec.processes}: another process was lost after the rendezvous, before JAX "
            f"connected ({str(error).splitlines()[0][:200]}). Rerun the command on all hosts"
        ) from error
    say(spec, f"all {spec.processes} processes are connected")


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


# ------------------------------------------------------------------------------------------ agreement


def gather(text: str) -> list[str]:
    """The text of every process, cut to TEXT bytes; all processes must call it."""
    if jax.process_count() == 1:
        return [text]
    padded = np.zeros(TEXT, np.uint8)
    encoded = np.frombuffer(text.encode()[:TEXT], np.uint8)
    padded[: len(encoded)] = encoded
    rows = multihost_utils.process_allgather(padded)
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in rows]


def in_step(action: Callable[[], T]) -> T:
    """The result of `action()`, once it has succeeded on all processes; its failure on one is an error on all.

    `action` must not communicate.
    """
    failure: Exception | None = None
    try:
        result = action()
    except (OSError, ValueError, RuntimeError) as error:
        failure = error
    texts = gather("" if failure is None else str(failure) or type(failure).__name__)
    if failure is not None:
        raise failure
    for process, text in enumerate(texts):
        if text:
            raise RuntimeError(f"process {process}: {text}")
    return result


def agree(config: Mapping[str, Any], fingerprint: str = "") -> None:
    """Check that all processes run the same config and code on the same data and kind of device."""
    if jax.process_count() == 1:
        return
    everyone = [json.loads(text) for text in gather(json.dumps(identity(config, fingerprint)))]
    wrong = differences(everyone)
    if wrong:
        raise ValueError(f"the processes of a run differ: {'; '.join(wrong)}")


def identity(config: Mapping[str, Any], fingerprint: str = "") -> dict[str, str]:
    """What must be the same on all processes, as short strings."""
    package = Path(__file__).parents[1]
    code = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        code.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    settings = json.dumps(config, sort_keys=True, default=str).encode()
    return {
        "config": hashlib.sha256(settings).hexdigest()[:12],
        "code": code.hexdigest()[:12],
        "data": hashlib.sha256(fingerprint.encode()).hexdigest()[:12],
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
            parts = ", ".join(f"{value} on process {names(who)}" for value, who in groups.items())
            found.append(f"{name} is {parts}")
    return found


def check_shared(root: Path) -> None:
    """Check that all processes see the same folder: each must find the file that process 0 writes there.

    On disks that are not shared, a checkpoint would hold the arrays of process 0 alone.
    """
    if jax.process_count() == 1:
        return
    mark = root / f".shared-{gather(uuid.uuid4().hex)[0]}"
    in_step(lambda: mark.touch() if jax.process_index() == 0 else None)
    seen = _appears(mark)
    blind = {process for process, text in enumerate(gather("" if seen else "blind")) if text}
    if jax.process_index() == 0:
        mark.unlink(missing_ok=True)
    if blind:
        raise ValueError(
            f"the workdir {root} is not shared: a file that process 0 wrote there cannot be seen by process "
            f"{names(blind)}. All processes of a run need one --workdir on a disk that all hosts mount, since each "
            "writes its part of a checkpoint"
        )


def _appears(path: Path) -> bool:
    deadline = time.monotonic() + VISIBLE
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def same_step(step: int, root: Path) -> int:
    """The step that all processes resume from; an error if they see different checkpoints."""
    groups: dict[str, set[int]] = {}
    for process, text in enumerate(gather(str(step))):
        groups.setdefault(text, set()).add(process)
    if len(groups) > 1:
        seen = ", ".join(f"step {text} on process {names(who)}" for text, who in groups.items())
        raise ValueError(f"the processes see different newest checkpoints in {root}: {seen}; the disk must be shared")
    return step


def stalled(text: str) -> None:
    """End a run of several processes that makes no progress, to be restarted; warn in a single one."""
    if jax.process_count() > 1:
        fail(RETRY, f"{text}. Rerun the command on all hosts to resume from the last complete checkpoint")
    print(f"warning: {text}", flush=True)
