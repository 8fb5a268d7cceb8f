"""Executes the notebooks as they are and stores their outputs: python notebooks/refresh.py [NAME ...]

Takes minutes per notebook on two cores. Execution counts and metadata of cells are dropped, so that a refresh changes
outputs alone. Figures of cells tagged "gallery" are written to docs/gallery too.

    python notebooks/refresh.py --colab=OWNER/NAME

only writes a line under each title that opens the notebook of that GitHub repository in Colab, and says what to install
there.
"""

from __future__ import annotations

import base64
import os
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent
GALLERY = FOLDER.parent / "docs" / "gallery"
BADGE = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"


def with_badge(text: str, name: str, repository: str) -> str:
    """The first cell of a notebook with the line for Colab below its title, in place of an earlier one."""
    title, *rest = [line for line in text.split("\n") if not line.startswith(BADGE)]
    place = f"https://colab.research.google.com/github/{repository}/blob/main/notebooks/{name}.ipynb"
    line = f"{BADGE}({place}) There, run `%pip install git+https://github.com/{repository}` first."
    body = "\n".join(rest).lstrip("\n")
    return f"{title}\n\n{line}\n\n{body}"


def add_badges(repository: str) -> None:
    """Write the line into every notebook."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        notebook.cells[0].source = with_badge(notebook.cells[0].source, path.stem, repository)
        nbformat.write(notebook, path)


def refresh(path: Path) -> None:
    """Execute one notebook in an empty folder and write it back with its outputs."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        manager = AsyncKernelManager(
            kernel_name="python3",
            kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),  # python3 is then the running interpreter
            connection_file=str(Path(folder) / "kernel.json"),
        )
        client = NotebookClient(notebook, km=manager, timeout=3600, resources={"metadata": {"path": folder}})
        env = {**os.environ, "MPLBACKEND": "module://matplotlib_inline.backend_inline", "IPYTHONDIR": folder}
        client.execute(env=env, cleanup_kc=True)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.execution_count = None
            for output in cell.outputs:
                if "execution_count" in output:
                    output.execution_count = None
    nbformat.write(notebook, path)
    for file, content in gallery(notebook, path.stem).items():
        (GALLERY / file).write_bytes(content)


def gallery(notebook: nbformat.NotebookNode, name: str) -> dict[str, bytes]:
    """The figures of cells tagged "gallery", which docs/gallery.md shows, by file name."""
    tagged = [cell for cell in notebook.cells if "gallery" in cell.metadata.get("tags", ())]
    figures = [out.data["image/png"] for cell in tagged for out in cell.outputs if "image/png" in out.get("data", {})]
    return {f"{name}_{i}.png": base64.b64decode(figure) for i, figure in enumerate(figures)}


def main() -> None:
    if sys.argv[1:] and sys.argv[1].startswith("--colab="):
        add_badges(sys.argv[1].removeprefix("--colab="))
        return
    names = sys.argv[1:] or sorted(path.stem for path in FOLDER.glob("*.ipynb"))
    for name in names:
        start = time.monotonic()
        refresh(FOLDER / f"{name}.ipynb")
        print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
