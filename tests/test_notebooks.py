"""Notebooks: stored with the outputs of a whole run, and each runs from a fresh kernel to the end at a small size."""

import ast
import os
import sys
from pathlib import Path

import nbformat
import pytest
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "notebooks"))
import refresh

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "notebooks").glob("*.ipynb"))
TIMEOUT = 600  # seconds per cell

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def reader_environment(scratch: Path) -> dict[str, str]:
    """What a reader's kernel would see: this process's environment, compilation cache included, without the
    simulated devices and strict dtypes of the tests; figures go inline and IPython's files to `scratch`."""
    env = {name: value for name, value in os.environ.items() if name != "JAX_NUMPY_DTYPE_PROMOTION"}
    flags = env.pop("XLA_FLAGS", "").split()
    env["XLA_FLAGS"] = " ".join(flag for flag in flags if "host_platform_device_count" not in flag)
    env.setdefault("JAX_PLATFORMS", "cpu")
    return env | {
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "IPYTHONDIR": str(scratch / "ipython"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


# values of the cell tagged "parameters" in each notebook, for a run of seconds
PARAMETERS = {
    "compose": {"FINE": 129, "BUDGETS": (10, 20)},
    "distil": {"TEACHER_STEPS": 20, "UPDATES": 10, "BATCH": 32, "CHAIN_STEPS": 3},
    "compare": {"STEPS": 4, "BUDGET": "2e4", "METHODS": "sfd:2", "SAMPLES": 64, "RATES": "1"},
    "features": {"STEPS": 10, "BATCH": 8},
    "own_teacher": {"STEPS": 20, "UPDATES": 4, "BATCH": 32, "NFE": 2},
}


def set_parameters(notebook: nbformat.NotebookNode, values: dict[str, object]) -> None:
    """Replace the values in the cell tagged "parameters", which must assign exactly these names."""
    (cell,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    names = [target.id for line in ast.parse(cell.source).body for target in line.targets]
    assert sorted(names) == sorted(values)
    cell.source = "\n".join(f"{name} = {value!r}" for name, value in values.items())


def execute(path: Path, scratch: Path) -> nbformat.NotebookNode:
    """The notebook, its training cut short, with the outputs of a run in `scratch`; a cell that raises raises here."""
    notebook = nbformat.read(path, as_version=4)
    set_parameters(notebook, PARAMETERS[path.stem])
    specs = KernelSpecManager(kernel_dirs=[])  # none installed counts: python3 is then the running interpreter
    manager = AsyncKernelManager(
        kernel_name="python3", kernel_spec_manager=specs, connection_file=str(scratch / "kernel.json")
    )
    client = NotebookClient(
        notebook, km=manager, timeout=TIMEOUT, startup_timeout=TIMEOUT, resources={"metadata": {"path": str(scratch)}}
    )
    return client.execute(env=reader_environment(scratch), cleanup_kc=True)  # a given manager is not stopped by default


def test_there_are_notebooks():
    assert NOTEBOOKS


@each_notebook
def test_stored_with_outputs(path):
    """`python notebooks/refresh.py` wrote them: cells that print or draw have outputs, none is an error or too large."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count is None for cell in code) and notebook.metadata.kernelspec.name == "python3"
    outputs = [output for cell in code for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 2
    assert not [output for output in outputs if output.output_type == "error"]
    assert all(cell.outputs for cell in code if "print(" in cell.source and "def " not in cell.source)
    assert path.stat().st_size < 1_500_000


def test_the_line_for_colab_is_below_the_title_and_there_once():
    begun = "# Title\n\nText of\ntwo lines."
    once = refresh.with_badge(begun, "compare", "me/jaxdiff")
    title, _, line, _, *rest = once.split("\n")
    assert (title, rest) == ("# Title", ["Text of", "two lines."])
    assert "github/me/jaxdiff/blob/main/notebooks/compare.ipynb" in line and "git+https://github.com/me/jaxdiff" in line
    assert refresh.with_badge(once, "compare", "me/jaxdiff") == once


def test_the_gallery_shows_the_figures_of_the_notebooks():
    made = {}
    for path in NOTEBOOKS:
        made |= refresh.gallery(nbformat.read(path, as_version=4), path.stem)
    stored = {path.name: path.read_bytes() for path in refresh.GALLERY.glob("*.png")}
    assert stored == made and len(made) >= 5
    page = refresh.GALLERY.with_suffix(".md").read_text()
    assert all(f"gallery/{name}" in page for name in made)


@each_notebook
def test_runs_and_draws(path, tmp_path):
    outputs = [output for cell in execute(path, tmp_path).cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.output_type == "error"]
    assert any("image/png" in output.get("data", {}) for output in outputs)
