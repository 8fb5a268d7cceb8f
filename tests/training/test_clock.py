"""The wall clock may be set while a run trains: durations are not measured by it."""

import itertools
import time

import jax.numpy as jnp
import pytest

from jaxdiff.training.checkpoint import Checkpoints


@pytest.mark.parametrize("jump", [3600.0, -3600.0, 50 * 365 * 86400.0])
def test_a_clock_that_is_set_during_a_save(tmp_path, monkeypatch, jump):
    """Every reading of the clock is an hour after (or before) the last one; or, once, fifty years later."""
    real, count = time.time, itertools.count()
    monkeypatch.setattr(time, "time", lambda: real() + (jump * next(count) if abs(jump) < 1e6 else jump))
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, {"a": jnp.arange(3.0)})
    checkpoints.wait()
    assert checkpoints.steps() == [1, 2]
    checkpoints.close()
