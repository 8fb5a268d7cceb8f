"""One question asked at every boundary: should the run stop here?

SIGTERM and SIGINT ask for it; a second SIGINT interrupts at once. With several processes the answer is agreed through
JAX's preemption sync point, so that all of them stop, and save, at the same step; JAX listens for SIGTERM itself then.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import jax
from jax.experimental import multihost_utils

from jaxdiff.training.distributed import RETRY

T = TypeVar("T")


class Stop:
    """Context manager that turns signals into a flag."""

    def __init__(self) -> None:
        self.signal: str | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT) if jax.process_count() == 1 else (signal.SIGINT,):
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.signal == "SIGINT" and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number).name
        if jax.process_count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)  # what JAX listens for, to tell the other processes

    def asked(self, step: int) -> bool:
        """Whether to stop at this step; the same answer on every process."""
        if jax.process_count() == 1:
            return self.signal is not None
        return bool(multihost_utils.reached_preemption_sync_point(step))

    def during(self, work: Callable[[], T], what: str) -> T:
        """`work()`, which changes nothing on disk, in a thread: a stop asked meanwhile ends the process at once."""
        result: list[T] = []
        failure: list[BaseException] = []

        def run() -> None:
            try:
                result.append(work())
            except BaseException as error:
                failure.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(0.1)
            if self.signal is not None and jax.process_count() == 1:
                print(f"{self.signal} during {what}: nothing new to save, stopping", flush=True)
                sys.stdout.flush()
                os._exit(RETRY)  # the compiler cannot be interrupted, and no state has changed
        if failure:
            raise failure[0]
        return result[0]
