"""Strict settings for every test: simulated devices, strict dtypes, shapes checked, compiled programs cached."""

import mmap
import os
import tempfile
from importlib.util import find_spec
from pathlib import Path

FAST = "--xla_cpu_use_fusion_emitters=false"  # halves the time of compilation


def _known(flag: str) -> bool:
    """Whether the installed XLA has this flag: it takes no unknown ones."""
    for library in Path(find_spec("jaxlib").origin).parent.glob("libjax_common*"):
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as code:
            return code.find(flag.strip("-").split("=")[0].encode()) >= 0
    return False


os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",  # programs here are tiny: compiling is what takes time
        "--xla_llvm_disable_expensive_passes=true",
        *([FAST] if _known(FAST) else []),
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


@pytest.fixture(scope="module")
def tpu_compiler():
    """What compiling for a TPU that is not there needs: this process, among others, free to load the compiler, no flag
    that only XLA's CPU part knows, and no compilation cache, which cannot load a program without its device."""
    jax.devices()  # the CPU part has read the flags
    patch = pytest.MonkeyPatch()
    patch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    patch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"].replace(FAST, ""))
    from jaxdiff.plan.program import uncached

    with uncached():
        yield
    patch.undo()


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
