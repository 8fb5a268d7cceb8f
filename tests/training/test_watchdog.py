"""A run that makes no progress is noticed; one that works, saves or is suspended is not."""

import time

import pytest

from jaxdiff.training.watchdog import LONGER, TICK, Watchdog


class Later:
    """An array that becomes ready when it is told to."""

    def __init__(self, ready=False):
        self.ready = ready

    def is_ready(self):
        return self.ready


def wait_until(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_steps_that_stop_are_noticed_and_located():
    told = []
    with Watchdog(0.3, told.append) as watchdog:
        watchdog.step(Later())
        wait_until(lambda: told)
    assert "no progress for 1 s in the first training step, at " in told[0] and "test_watchdog.py" in told[0]


def test_steps_that_finish_on_the_devices_are_progress():
    """The loop may be blocked for long, as at a log line, while the devices work through what it dispatched."""
    told, arrays = [], [Later() for _ in range(12)]
    with Watchdog(2.0, told.append) as watchdog:
        watchdog.step(Later(ready=True))
        time.sleep(2 * TICK)
        for array in arrays:
            watchdog.step(array)
        for array in arrays:
            time.sleep(0.5)
            array.ready = True
        assert not told
        wait_until(lambda: told)
    assert "no progress for 2 s in training steps" in told[0]


def test_other_work_has_its_own_limit_or_none():
    told = []
    with Watchdog(0.2, told.append) as watchdog:
        watchdog.step(Later(ready=True))
        with watchdog.during("compiling", limited=False):
            time.sleep(4 * LONGER * 0.2)
        assert not told
        with watchdog.during("evaluating"):
            for _ in range(10):
                time.sleep(LONGER * 0.2 / 2)
                watchdog.alive()
            assert not told
            wait_until(lambda: told)
    assert "in evaluating" in told[0]


def test_time_in_which_the_process_was_stopped_does_not_count(monkeypatch):
    """After Ctrl-Z, or on a machine that was suspended, the clock jumps."""
    told, real, jump = [], time.monotonic, [0.0]
    monkeypatch.setattr("jaxdiff.training.watchdog.time.monotonic", lambda: real() + jump[0])
    with Watchdog(20 * TICK, told.append) as watchdog:
        watchdog.step(Later(ready=True))
        time.sleep(3 * TICK)
        jump[0] = 1e6
        time.sleep(3 * TICK)
        assert not told


def test_off():
    with Watchdog(0.0, pytest.fail) as watchdog:
        watchdog.step(Later())
        assert not watchdog._thread.is_alive()
