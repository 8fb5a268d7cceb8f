"""Strict settings for every test: simulated devices, strict dtypes, shapes checked, compiled programs cached."""

import os
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",  # programs here are tiny: compiling is what takes time
        "--xla_llvm_disable_expensive_passes=true",
    ]
)
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir()) / "jaxdiff-test-cache"))
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"

from jaxtyping import install_import_hook

install_import_hook("jaxdiff", "shape_checks.check")

import jax
import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"
GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def x64():
    """Double precision for the length of a test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def count_traces():
    """Wraps a function so that `.traces` counts how often JAX traces (or Python calls) it."""

    def wrap(function):
        def counted(*args, **kwargs):
            counted.traces += 1
            return function(*args, **kwargs)

        counted.traces = 0
        return counted

    return wrap
