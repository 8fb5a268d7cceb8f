"""Disks that fail: errors of one line wherever it happens, a process that ends, saves that leave nothing in memory."""

import asyncio
import errno
import gc
import logging
import os
import shutil
import threading
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
import tensorstore
from orbax.checkpoint._src import asyncio_utils

from jaxdiff.errors import raised_on_purpose
from jaxdiff.training.checkpoint import CheckpointError, Checkpoints, OrbaxLog
from jaxdiff.training.workdir import explained, locked


def fail(number, *names):
    raise OSError(number, os.strerror(number), *names)


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.ENOSPC, "free some space"), (errno.EIO, "check the disk"), (errno.EROFS, "check the disk")],
)
def test_an_error_of_the_disk_is_one_line(tmp_path, number, remedy):
    """With the name of the file where the system gives one, as for `open` but not for `write`."""
    path = str(tmp_path / "samples" / "a.png")
    for names, what in (([path], path), ([path, None, str(tmp_path / "b")], path), ([], f"files in {tmp_path}")):
        said = f"cannot read or write {what}: {os.strerror(number)}; {remedy}"
        with pytest.raises(OSError, match=said) as caught, locked(tmp_path):
            fail(number, *names)
        assert raised_on_purpose(caught.value)
        assert "\n" not in str(caught.value)


def test_other_errors_are_left_as_they_are(tmp_path):
    """Files that are none of the run's, and sockets."""
    for number, names in ((errno.ENOENT, ["/nowhere/images"]), (errno.ECONNREFUSED, []), (errno.EIO, [3])):
        with pytest.raises(OSError, match=os.strerror(number)) as caught, explained(tmp_path):
            fail(number, *names)
        assert not raised_on_purpose(caught.value)


def test_a_log_that_cannot_be_opened_says_nothing(tmp_path, capsys):
    log = OrbaxLog(tmp_path / "gone" / "orbax.log", read_only=False)
    logging.getLogger("absl").error("no space left")
    log.close()
    assert capsys.readouterr().err == ""


def test_a_save_that_failed_does_not_hold_up_the_exit(tmp_path, monkeypatch):
    """Orbax's threads may wait for each other, and the process would for them."""
    started = []
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda self: (started.append(self), start(self)))
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").write_text("")

    def save():
        checkpoints.save(1, {"a": jnp.ones(3), "b": jnp.ones(3)})
        checkpoints.wait()

    with pytest.raises(CheckpointError, match=r"could not write the checkpoint of step 1 "):
        save()
    waiting = [thread for thread in started if type(thread).__name__ == "_SignalingThread"]
    assert waiting and all(thread.daemon for thread in waiting)


def test_memory_does_not_grow_with_arrays_and_saves(tmp_path, monkeypatch):
    """What TensorStore turns from JSON into Python's objects is lost: how often it does so in a save."""
    counts = []

    class Spec:
        def __init__(self, given):
            self.real = real.Spec(given)

        def to_json(self):
            counts.append("spec")
            return self.real.to_json()

    def opened(spec, *arguments, **options):
        return real.open(getattr(spec, "real", spec), *arguments, **options)

    real = tensorstore.KvStore
    monkeypatch.setattr(tensorstore, "KvStore", SimpleNamespace(Spec=Spec, open=opened))
    monkeypatch.setattr(tensorstore, "experimental_collect_matching_metrics", lambda *_: counts.append("metrics") or [])
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, {f"a{i}": jnp.ones(3) for i in range(40)})
    checkpoints.close()
    assert counts.count("spec") <= 8 and "metrics" not in counts


def test_a_lost_process_is_no_matter_of_the_disk(tmp_path, monkeypatch):
    """Launchers retry the one and not the other, by the kind of error."""
    checkpoints = Checkpoints(tmp_path)
    told = []
    checkpoints.tell_failures(told.append)
    for cause, kind, count in (
        (RuntimeError("UNAVAILABLE: Socket closed"), TimeoutError, 0),
        (None, CheckpointError, 1),
    ):

        def failing(cause=cause):
            raise TimeoutError("timed out") from cause

        checkpoints._manager._wait_for_checkpointers = failing
        checkpoints.tell_failures(told.append)
        monkeypatch.setattr(checkpoints._manager, "wait_until_finished", checkpoints._manager._wait_for_checkpointers)
        with pytest.raises(kind, match="timed out"):
            checkpoints.wait()
        assert len(told) == count


def test_what_ends_after_a_failed_save_is_silent(capfd, caplog):
    """TensorStore reports to Orbax's event loop from its own threads, also when that is closed; tasks are abandoned."""
    loops, tasks = [], []

    async def failing():
        fail(errno.ENOSPC)

    async def abandoned():
        loops.append(asyncio.get_running_loop())
        tasks.append(asyncio.ensure_future(failing()))
        await asyncio.sleep(0)

    asyncio_utils.run_sync(abandoned())
    (loop,) = loops
    assert tasks.pop().done()
    gc.collect()
    assert loop.is_closed()
    thread = threading.Thread(target=loop.call_soon_threadsafe, args=(print, "late"))
    thread.start()
    thread.join()
    assert capfd.readouterr() == ("", "") and not caplog.records
