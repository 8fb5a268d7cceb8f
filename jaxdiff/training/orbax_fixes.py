"""What this package needs of Orbax beside checkpoints: timeouts by monotonic time, threads that do not hold up the end
of a process, the client of JAX's processes."""

from __future__ import annotations

import contextlib
import importlib
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

from orbax.checkpoint import multihost


def apply() -> None:
    """Let Orbax measure by monotonic time: a wall clock that is set during a save would end the run.

    After a save that fails, its threads wait up to five minutes for each other, and with them the exit of the process:
    they become daemons. A save that succeeds is waited for before a run ends.

    What its modules call `time` is replaced; another version of Orbax, without these modules, is left as it is.
    """
    for name in ("future", "signaling_client"):
        with contextlib.suppress(ImportError):
            module: Any = importlib.import_module(f"orbax.checkpoint._src.futures.{name}")
            module.time = SimpleNamespace(**{**vars(time), "time": time.monotonic})
            if hasattr(module, "_SignalingThread"):
                module._SignalingThread = partial(module._SignalingThread, daemon=True)


def coordination_client() -> Any:
    """The client of JAX's coordination service, to which JAX has no public way; None with one process."""
    if not multihost.is_jax_distributed_client_initialized():
        return None
    return multihost.get_jax_distributed_client()
