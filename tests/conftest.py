"""Strict settings for every test: simulated devices, strict dtypes, shapes checked, compiled programs cached."""

import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

DEVICES = "--xla_force_host_platform_device_count=8"
FAST = "--xla_cpu_use_fusion_emitters=false"  # halves the time of compilation
# Programs here are tiny: compiling them is what takes time. Releases of XLA drop such flags without notice.
OPTIONAL = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true", FAST]


def _accepted(flag: str) -> bool | None:
    """Whether the installed XLA starts with this flag: an unknown one aborts the process. None if it fails otherwise."""
    child = subprocess.run(
        [sys.executable, "-c", "import jax; jax.devices()"],
        env=os.environ | {"XLA_FLAGS": flag, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    if child.returncode == 0:
        return True
    return False if "Unknown flag" in child.stderr else None


def _accepted_flags(folder: Path) -> list[str]:
    """The optional flags that the installed XLA accepts, tried once per version of jaxlib.

    Workers that start together may each try them: the file appears whole or not at all.
    """
    path = folder / f"xla-flags-{version('jaxlib')}.json"
    known = json.loads(path.read_text()) if path.is_file() else {}
    untried = [flag for flag in OPTIONAL if flag not in known]
    if untried:
        results = {flag: _accepted(flag) for flag in untried}
        known |= {flag: result for flag, result in results.items() if result is not None}
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".json", delete=False) as file:
            json.dump(known, file)
        os.replace(file.name, path)
    return [flag for flag in OPTIONAL if known.get(flag)]


os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir()) / "jaxdiff-test-cache"))
if DEVICES not in os.environ.get("XLA_FLAGS", ""):  # workers of xdist inherit the flags
    accepted = _accepted_flags(Path(os.environ["JAX_COMPILATION_CACHE_DIR"]))
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), DEVICES, *accepted])
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"  # nobody reads them, and lowering takes 6 % less time
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"

from jaxtyping import install_import_hook

install_import_hook("jaxdiff", "shape_checks.check")

import jax
import pytest

ENOUGH = 2.2 * 2**30  # bytes of a worker from which it forgets its programs after a test, not only after a module


def _resident() -> int:
    """Bytes of this process in memory; 0 where the system does not say."""
    path = Path("/proc/self/statm")
    return int(path.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if path.is_file() else 0


def _forget_programs() -> None:
    jax.clear_caches()
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc would keep what was freed
        trim(0)


@pytest.fixture(scope="module", autouse=True)
def programs_end_with_their_module():
    """A worker that kept all its compiled programs would grow to several GiB."""
    yield
    _forget_programs()


@pytest.fixture(autouse=True)
def bounded_memory():
    """Some modules compile as much as others together."""
    yield
    if _resident() > ENOUGH:
        _forget_programs()


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
