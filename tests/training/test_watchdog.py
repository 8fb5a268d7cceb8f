"""A run that makes no progress is noticed; one that works, saves or is suspended is not.

The looks are made by hand, with the seconds they stand for, so that no test depends on the speed of the machine.
"""

import time

import pytest

from jaxdiff.training.watchdog import LONGER, TICK, Watchdog


class Later:
    """An array that becomes ready when it is told to."""

    def __init__(self, ready=False):
        self.ready = ready

    def is_ready(self):
        return self.ready


@pytest.fixture
def told():
    return []


@pytest.fixture
def watchdog(told):
    return Watchdog(10.0, told.append)


def pass_time(watchdog, seconds):
    for _ in range(round(seconds / TICK)):
        watchdog.look(TICK)


def test_its_thread_notices_and_locates_steps_that_stop(told):
    with Watchdog(0.1, told.append) as watchdog:
        watchdog.step(Later())
        for _ in range(6000):  # a thread that never looks must not hang the suite
            if told:
                break
            time.sleep(0.01)  # in this file: waiting for an event would be in threading.py
    assert "in the first training step, at " in told[0] and "test_watchdog.py" in told[0]


def test_the_first_step_has_a_longer_limit(watchdog, told):
    watchdog.step(Later())
    pass_time(watchdog, 10.0 * LONGER)
    assert not told
    pass_time(watchdog, 2 * TICK)
    assert "no progress for 40 s in the first training step" in told[0]


def test_steps_that_finish_on_the_devices_are_progress(watchdog, told):
    """The loop may be blocked for long, as at a log line, while the devices work through what it dispatched."""
    arrays = [Later() for _ in range(5)]
    watchdog.step(Later(ready=True))
    watchdog.look(TICK)
    for array in arrays:
        watchdog.step(array)
    for array in arrays:
        pass_time(watchdog, 9.0)
        array.ready = True
    pass_time(watchdog, 10.0)
    assert not told
    pass_time(watchdog, 2 * TICK)
    assert "no progress for 10 s in training steps" in told[0]


def test_other_work_has_its_own_limit_or_none(watchdog, told):
    watchdog.step(Later(ready=True))
    with watchdog.during("compiling", limited=False):
        pass_time(watchdog, 1000.0)
    with watchdog.during("evaluating"):
        for _ in range(5):
            pass_time(watchdog, 39.0)
            watchdog.alive()
        assert not told
        pass_time(watchdog, 10.0 * LONGER + TICK)
    assert len(told) == 1 and "no progress for 40 s in evaluating" in told[0]


def test_time_in_which_the_process_was_stopped_does_not_count(watchdog, told):
    """After Ctrl-Z, or on a machine that was suspended, the clock jumps."""
    watchdog.step(Later(ready=True))
    watchdog.look(TICK)
    watchdog.step(Later())
    watchdog.look(1e6)
    assert not told


def test_off():
    with Watchdog(0.0, pytest.fail) as watchdog:
        watchdog.step(Later())
        assert not watchdog._thread.is_alive()
