"""Runs the Python blocks of pages as a reader would, in the current folder: python run_pages.py PAGE ...

Blocks of a page share a namespace. Prints one JSON line per page: its seconds of CPU, and the traceback if it failed.
"""

import json
import sys
import time
import traceback
from pathlib import Path

from doc_blocks import ROOT, blocks, runnable


def run(page: Path) -> str:
    """The traceback of the first block that raises, or nothing."""
    namespace = {"__name__": "page"}
    for block in blocks(page, "python"):
        if block.reason:
            continue
        try:
            exec(compile(runnable(block), block.name, "exec"), namespace)
        except BaseException:
            return f"{block.name}\n{traceback.format_exc()}"
    return ""


if __name__ == "__main__":
    for name in sys.argv[1:]:
        begun = time.process_time()
        error = run(ROOT / name)
        print(
            "\n" + json.dumps({"page": name, "cpu": round(time.process_time() - begun, 1), "error": error}), flush=True
        )
