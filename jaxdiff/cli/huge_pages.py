"""Huge pages for arrays on the host.

A program on CPU allocates its temporary arrays anew at every call, and the kernel then maps and clears them page by
page: a fifth of the CPU time of a small UNet's training step. With glibc 2.35 or later `malloc` can ask for huge pages,
but only if the environment says so when the process starts.
"""

from __future__ import annotations

import os
import sys

VARIABLE, VALUE = "GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"


def restart() -> None:
    """Start this process again, as the same process, with huge pages; settings of the user's own are left alone."""
    if sys.platform != "linux" or VARIABLE in os.environ:
        return
    os.environ[VARIABLE] = VALUE
    os.execv(sys.executable, sys.orig_argv)
