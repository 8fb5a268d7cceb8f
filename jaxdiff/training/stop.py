"""Graceful stop on signals, checked at every step.

SIGTERM and SIGINT request a stop; a second SIGINT interrupts immediately. With several processes the stop is agreed
through JAX's preemption sync point, so that all stop and save at the same step; JAX then handles SIGTERM itself.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

import jax
from jax.experimental import multihost_utils

from jaxdiff.training.peers import RETRY, leave

T = TypeVar("T")


class Stop:
    """Context manager that turns signals into a flag."""

    def __init__(self) -> None:
        self.signal: str | None = None
        self._previous: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            signals = [signal.SIGINT] if jax.process_count() > 1 else [signal.SIGTERM, signal.SIGINT]
            for number in signals:
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
            os.kill(os.getpid(), signal.SIGTERM)  # handled by JAX, which notifies the other processes

    def requested(self, step: int) -> bool:
        """Whether to stop at this step; the same answer on every process."""
        if jax.process_count() == 1:
            return self.signal is not None
        return bool(multihost_utils.reached_preemption_sync_point(step))

    def during(self, work: Callable[[], T], what: str) -> T:
        """Run `work()`, which writes nothing to disk, in a thread: a stop request meanwhile exits immediately."""
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
                leave(RETRY)  # the compiler cannot be interrupted, and no state has changed
        if failure:
            raise failure[0]
        return result[0]
