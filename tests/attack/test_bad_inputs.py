"""More than 100 bad inputs, each with a clear message of one line; see bad_inputs.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_bad_inputs(tmp_path, capsys):
    script = Path(__file__).with_name("bad_inputs.py")
    settings = ("XLA_FLAGS", "JAX_NUMPY_DTYPE_PROMOTION")  # of the tests, which a user does not have
    kept = {name: value for name, value in os.environ.items() if name not in settings}
    root = str(Path(__file__).parents[2])
    child = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        env=kept | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    found = json.loads(child.stdout.splitlines()[-1])
    with capsys.disabled():
        print(f"\n{found['cases']} bad inputs, {len(found['bad'])} accepted or without a clear message")
        print("\n".join(found["bad"]))
    assert found["cases"] >= 100 and not found["bad"]
