"""The package as a whole: import cost, no device, no foreign frameworks, lint and types."""

import subprocess
import sys
from pathlib import Path

import pytest

import jaxdiff

ROOT = Path(__file__).resolve().parents[1]


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout


def test_import_adds_little_to_jax_and_touches_no_device():
    out = run(
        "import sys, jax; before = set(sys.modules)\n"
        "import jaxdiff; light = set(sys.modules) - before\n"
        "import jaxdiff.denoisers, jaxdiff.solvers\n"
        "heavy = {'flax', 'orbax', 'torch', 'tensorflow', 'matplotlib', 'scipy.stats', 'grain'} & set(sys.modules)\n"
        "from jax._src import xla_bridge\n"
        "print(len(light), sorted(heavy), xla_bridge.backends_are_initialized())"
    )
    assert out.split(maxsplit=1) == ["1", "[] False\n"]


def test_importing_everything_brings_no_other_framework_and_no_device():
    out = run(
        "import sys, pkgutil, importlib, jaxdiff\n"
        "for m in pkgutil.walk_packages(jaxdiff.__path__, 'jaxdiff.'): importlib.import_module(m.name)\n"
        "from jax._src import xla_bridge\n"
        "print(sorted({'torch', 'tensorflow'} & set(sys.modules)), xla_bridge.backends_are_initialized())"
    )
    assert out == "[] False\n"


def test_unknown_attribute_names_what_exists():
    with pytest.raises(AttributeError, match=r"no attribute 'sampler'; it has .*denoisers.*solvers"):
        _ = jaxdiff.sampler


@pytest.mark.parametrize(
    "command",
    [
        ["ruff", "check", "--config", ".ci/ruff.toml", "--no-cache", "."],
        ["ruff", "format", "--config", ".ci/ruff.toml", "--no-cache", "--check", "."],
        ["mypy", "--config-file", ".ci/mypy.ini", "jaxdiff"],
    ],
    ids=["lint", "format", "types"],
)
def test_style(command, tmp_path):
    extra = ["--cache-dir", str(tmp_path)] if command[0] == "mypy" else []
    result = subprocess.run([sys.executable, "-m", *command, *extra], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
