"""What is published: an sdist and a wheel with all files, and the wheel runs without the checkout."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
WANTED = (
    "py.typed",
    "data/digits.npz",
    "evaluation/digits_classifier.npz",
    "configs/default.py",
    "training/trainer.py",
)


@pytest.mark.slow
def test_a_wheel_built_from_the_sdist_runs_the_quickstart(tmp_path):
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path / "dist", ROOT]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (sdist,), (wheel,) = (tmp_path / "dist").glob("*.tar.gz"), (tmp_path / "dist").glob("*.whl")
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
    assert any(name.endswith("configs/default.py") for name in names) and any("CHANGELOG" in name for name in names)
    with zipfile.ZipFile(wheel) as archive:
        assert {f"jaxdiff/{name}" for name in WANTED} <= set(archive.namelist())
        assert not [name for name in archive.namelist() if name.startswith(("tests", "experiments"))]
        archive.extractall(tmp_path / "installed")
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    command = [sys.executable, "-m", "jaxdiff.cli", "quickstart", "--steps=4", "--samples=64"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "quickstart" / "report.html").is_file()
