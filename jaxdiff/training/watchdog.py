"""Ends a run that is alive but makes no progress, such as a process that waits for data that never arrives.

Progress is a step that has finished on the devices, which run behind the loop: `step` hands over an array of each step,
and a thread sees them become ready. Time in which the whole process was stopped (Ctrl-Z, a suspended machine) does not
count: the thread adds up its own short waits. Compilation has no limit; the first step, saving, evaluating and sampling
have a longer one.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

TICK = 0.5  # seconds between looks
LONGER = 4  # limit of the first step, of saving, evaluating and sampling, in limits of a step


@runtime_checkable
class Pending(Protocol):
    """A jax.Array, as far as it matters here."""

    def is_ready(self) -> bool: ...


class Watchdog:
    """Calls `expire(text)` when no step finishes for `limit` seconds; 0 turns it off."""

    def __init__(self, limit: float, expire: Callable[[str], None]) -> None:
        self.limit, self._expire = limit, expire
        self._phase, self._allowed = "starting", 0.0
        self._pending: deque[Pending] = deque()
        self._finished, self._idle, self._done = 0, 0.0, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watchdog:
        if self.limit:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()

    def step(self, array: Pending) -> None:
        """A step was dispatched; `array` is one of its results."""
        if self.limit:
            self._pending.append(array)
            if self._finished:
                self._begin("training steps", self.limit)
            else:  # other processes may still be compiling
                self._begin("the first training step", LONGER * self.limit)

    @contextmanager
    def during(self, phase: str, limited: bool = True) -> Iterator[None]:
        """Work other than steps, with a limit of its own or none."""
        before = self._phase, self._allowed
        self._begin(phase, LONGER * self.limit if limited else 0.0)
        try:
            yield
        finally:
            self._begin(*before)

    def alive(self) -> None:
        """The work in progress has advanced."""
        self._idle = 0.0

    def _begin(self, phase: str, allowed: float) -> None:
        self._phase, self._allowed, self._idle = phase, allowed, 0.0

    def _run(self) -> None:
        before = time.monotonic()
        while not self._done.wait(min(TICK, self.limit / 10)):
            now = time.monotonic()
            self.look(now - before)
            before = now

    def look(self, elapsed: float) -> None:
        """Counts finished steps, `elapsed` seconds after the last look; expires if there was none for too long."""
        self._idle += min(elapsed, 2 * TICK)
        while self._pending and self._pending[0].is_ready():
            self._pending.popleft()
            self._finished += 1
            self._idle = 0.0
        if self._allowed and self._idle > self._allowed:
            self._expire(f"no progress for {self._allowed:.0f} s in {self._phase}, at {main_thread_at()}")
            self._idle = 0.0


def main_thread_at() -> str:
    """Where the main thread is: the innermost call of this package, and the innermost of all."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    calls = list(traceback.extract_stack(frame)) if frame is not None else []
    own = [call for call in calls if "jaxdiff" in call.filename]
    shown = dict.fromkeys(f"{call.filename}:{call.lineno} ({call.name})" for call in [*own[-1:], *calls[-1:]])
    return ", in ".join(shown)
