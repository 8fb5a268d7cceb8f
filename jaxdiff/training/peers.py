"""The processes of a run end together: with one exit code, and with a message that names the first to fail.

A process that fails stores its error in JAX's coordination service, waits until the others have read it, and exits.
The others poll for such an error, exit with the same code, and never see the lost connection that would abort them. A
process that is lost without a word shows as a failing collective, or as a missed heartbeat, on which JAX aborts; so it
does on the loss of process 0, which runs the service. In each case the others exit with RETRY.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from jaxdiff.errors import raised_on_purpose
from jaxdiff.training import lock
from jaxdiff.training.orbax_fixes import coordination_client

RETRY = 75  # exit code of an interrupted run that should be restarted (EX_TEMPFAIL), for launchers
REFUSED = 2  # exit code of an error in the config, the data or the disk, which a restart will not mend
BUG = 1  # exit code of an unexpected error
# error texts that indicate a lost process: from collectives, gRPC, JAX's coordination service
LOST = ("Gloo", "Connection closed by peer", "Connection reset", "UNAVAILABLE", "DEADLINE_EXCEEDED", "heartbeat")
FAILED, HEARD, LEAVING = "jaxdiff/failed", "jaxdiff/heard", "jaxdiff/leaving"  # keys in the coordination service
POLL, PATIENCE = 0.5, 5.0  # seconds between polls; seconds to wait for the others to hear


class Failure(NamedTuple):
    """The first failure of a run."""

    process: int
    code: int
    text: str


def is_loss(error: BaseException) -> bool:
    """Whether an error, or one that caused it, says that another process was lost."""
    seen: BaseException | None = error
    while seen is not None:
        if any(word in str(seen) for word in LOST):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def leave(code: int, text: str = "") -> None:
    """Exit at once: an orderly exit would wait for the other processes, and abort if they are gone."""
    if text:
        print(f"process {jax.process_index()} of {jax.process_count()}: {text}", file=sys.stderr)
    lock.release_all()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def fail(code: int, text: str) -> None:
    """Tell the other processes why this one ends, wait until they have heard, and exit."""
    client: Any = coordination_client()
    if client is not None:
        try:
            client.key_value_set(FAILED, json.dumps(Failure(jax.process_index(), code, text[:2000])))
        except jax.errors.JaxRuntimeError:  # another was first, or the service is gone
            follow(failure_of_another())
        _wait_for(HEARD, jax.process_count() - 1)
        _set(LEAVING)
    leave(code, text)


def _set(key: str) -> None:
    client: Any = coordination_client()
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        client.key_value_set(f"{key}/{jax.process_index()}", "1", allow_overwrite=True)


def _wait_for(key: str, count: int) -> None:
    """Until that many processes have set the key, or PATIENCE seconds."""
    client: Any = coordination_client()
    deadline = time.monotonic() + PATIENCE
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        while time.monotonic() < deadline and len(client.key_value_dir_get(key)) < count:
            time.sleep(POLL / 5)


def exit_on_abort() -> None:
    """From now on, when JAX aborts this process because another is lost, exit with RETRY instead of SIGABRT.

    JAX's callback for it cannot be set from Python. The handler is one of C, since Python's own would run in the main
    thread, after the abort.
    """
    global _on_abort
    with contextlib.suppress(AttributeError, OSError):  # a system without such a C library
        _on_abort = ctypes.CFUNCTYPE(None, ctypes.c_int)(_aborted)
        install = ctypes.CDLL(None).signal
        install.restype, install.argtypes = ctypes.c_void_p, [ctypes.c_int, type(_on_abort)]
        install(signal.SIGABRT, _on_abort)


_on_abort: Any = None  # kept, for C refers to it


def _aborted(_: int) -> None:
    cause = "aborted by JAX: another process was lost or cannot be reached"
    os.write(2, f"{cause}. Rerun the command on all hosts to resume from the last complete checkpoint\n".encode())
    lock.release_all()
    os._exit(RETRY)


class Watch:
    """A thread that ends this process when another has failed."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(PATIENCE)

    def _run(self) -> None:
        pause = POLL * max(1.0, jax.process_count() / 64)  # the service answers at most 128 polls per second
        while not self._stop.wait(pause):
            follow(failure_of_another())


def failure_of_another() -> Failure | None:
    """The failure that another process has announced, if any."""
    client: Any = coordination_client()
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # nothing announced, or the service is gone
        failure = Failure(*json.loads(client.key_value_try_get(FAILED)))
        return None if failure.process == jax.process_index() else failure
    return None


def follow(failure: Failure | None) -> None:
    """Exit like the process that failed first. Process 0 is the last to go: it runs the service."""
    if failure is None:
        return
    _set(HEARD)
    if jax.process_index() == 0:
        _wait_for(HEARD, jax.process_count() - 1)
        _wait_for(LEAVING, 1)
        time.sleep(POLL)
    leave(failure.code, f"process {failure.process} failed: {failure.text}")


@contextlib.contextmanager
def ending_together() -> Iterator[None]:
    """With several processes, an error in one ends all, with exit code 2 if a retry will not mend it."""
    if jax.process_count() == 1:
        yield
        return
    try:
        with Watch():
            yield
    except Exception as error:  # failed collectives have several types, recognised by their text
        _end(error)


def _end(error: Exception) -> None:
    lost = is_loss(error) and not raised_on_purpose(error)
    deadline = time.monotonic() + (4 * POLL if lost else 0)
    follow(failure_of_another())
    while time.monotonic() < deadline:  # what looks like a loss may be a failure that is being announced
        time.sleep(POLL)
        follow(failure_of_another())
    if lost:
        cause = str(error).splitlines()[0][:200]
        fail(
            RETRY,
            f"another process was lost or cannot be reached ({cause}). Rerun the command on all hosts to resume from "
            "the last complete checkpoint",
        )
    if not raised_on_purpose(error) or "--traceback" in sys.argv:
        traceback.print_exception(error)
    if raised_on_purpose(error):
        fail(REFUSED, str(error))
    fail(BUG, f"{type(error).__name__}: {error}")
