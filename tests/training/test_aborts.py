"""JAX aborts a process whose peers are lost, from a thread of its own: launchers see an exit code that says retry."""

import subprocess
import sys

from jaxdiff.training.peers import RETRY

ABORT = """
import ctypes, sys, threading, time
from pathlib import Path
from jaxdiff.training import lock, peers
peers.exit_on_abort()
lock.acquire(Path(sys.argv[1]))
threading.Thread(target=ctypes.CDLL(None).abort).start()
while True:
    sum(range(1000))  # holds Python's lock most of the time
"""


def test_an_abort_is_an_exit_code_and_a_line(tmp_path):
    ended = subprocess.run([sys.executable, "-c", ABORT, str(tmp_path)], capture_output=True, text=True, check=False)
    assert ended.returncode == RETRY, ended
    (line,) = ended.stderr.splitlines()
    assert line.startswith("aborted by JAX: another process was lost") and "Rerun the command" in line
    assert list(tmp_path.iterdir()) == []  # the lock is released
