"""Silence where libtpu is installed and no TPU is there.

JAX 0.10 tries every platform that is installed, and libtpu writes a page about what it misses before the first line of
a command.
"""

from __future__ import annotations

import os

ABSENT = {"TPU_ACCELERATOR_TYPE": "v5litepod-1", "TPU_WORKER_HOSTNAMES": "localhost"}


def quiet() -> None:
    """Answer libtpu's questions if JAX, on import, saw no chip; then TPU_SKIP_MDS_QUERY is "1"."""
    if os.environ.get("TPU_SKIP_MDS_QUERY") == "1":
        for name, value in ABSENT.items():
            os.environ.setdefault(name, value)
