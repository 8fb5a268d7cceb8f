"""One run per workdir: locks of living processes hold, those of dead ones are recognised."""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from jaxdiff.training import lock
from jaxdiff.training.lock import Locked, acquire, read, this_process

HOLD = "import sys, time; from pathlib import Path; from jaxdiff.training import lock; "
HOLD += "lock.acquire(Path(sys.argv[1])); print('held', flush=True); time.sleep(600)"


def hold(workdir):
    """Another process with the lock."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(workdir)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def test_a_living_process_holds_and_a_killed_one_does_not(tmp_path, capsys):
    other = hold(tmp_path)
    try:
        with pytest.raises(
            Locked, match=rf"another run is training in {tmp_path}: process {other.pid} on .*, started 2"
        ):
            acquire(tmp_path)
        assert read(tmp_path / lock.FILE).pid == other.pid
        other.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # dead, and not reaped yet
        held = acquire(tmp_path)
    finally:
        other.kill()
        other.communicate()
    assert f"removed the lock of a run that has ended: process {other.pid}" in capsys.readouterr().out
    assert read(tmp_path / lock.FILE) == held.owner
    with pytest.raises(Locked, match="this very process"):
        acquire(tmp_path)
    held.release()
    assert list(tmp_path.iterdir()) == []
    acquire(tmp_path).release()


def write(workdir, **changes):
    owner = this_process()._replace(**changes)
    (workdir / lock.FILE).write_text(json.dumps(owner._asdict()))
    return owner


def test_a_process_id_that_is_used_again_is_not_the_same_process(tmp_path):
    write(tmp_path, started="1")
    acquire(tmp_path).release()


def test_a_lock_from_another_machine_is_watched(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "PATIENCE", 2.0)
    owner = write(tmp_path, host="elsewhere", machine="another boot", pid=1)
    done = threading.Event()

    def touch():
        while not done.wait(0.1):
            os.utime(tmp_path / lock.FILE)

    thread = threading.Thread(target=touch)
    thread.start()
    try:
        with pytest.raises(Locked, match="process 1 on elsewhere"):
            acquire(tmp_path)
    finally:
        done.set()
        thread.join()
    assert read(tmp_path / lock.FILE) == owner
    acquire(tmp_path).release()  # nobody touches it any more


def test_the_holder_touches_its_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT", 0.05)
    held = acquire(tmp_path)
    before = held.path.stat().st_mtime_ns
    for _ in range(200):
        if held.path.stat().st_mtime_ns != before:
            break
        threading.Event().wait(0.05)
    else:
        raise AssertionError("never touched")
    held.release()


def test_of_many_that_find_a_stale_lock_one_gets_it(tmp_path):
    write(tmp_path, started="1")
    barrier, won, lost = threading.Barrier(8), [], []

    def compete():
        barrier.wait()
        try:
            won.append(acquire(tmp_path))
        except Locked:
            lost.append(1)

    threads = [threading.Thread(target=compete) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 7)
    assert read(tmp_path / lock.FILE) == won[0].owner
    won[0].release()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_hard_links(tmp_path, monkeypatch):
    def no_links(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    held = acquire(tmp_path)
    with pytest.raises(Locked):
        acquire(tmp_path)
    held.release()
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_a_lock_is_replaced(tmp_path):
    (tmp_path / lock.FILE).write_text('{"pid":')
    acquire(tmp_path).release()


def test_a_lock_that_was_taken_over_is_left_to_its_new_owner(tmp_path):
    held = acquire(tmp_path)
    other = write(tmp_path, pid=1)
    held.release()
    assert read(tmp_path / lock.FILE) == other
