"""What is read from files is never executed: no pickle, no eval; text is escaped in HTML; headers are bounded."""

import ast
from pathlib import Path

import numpy as np
import pytest

import jaxdiff
from jaxdiff import pages, quickstart
from jaxdiff.configs import default
from jaxdiff.weights import files

PACKAGE = Path(jaxdiff.__file__).parent
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib", "torch", "yaml"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__", "system", "popen"}
CODE = {"cli/configs.py", "outside.py"}  # config files and FILE.py:NAME are Python code, and the docs say so
HOSTILE = "<script>alert('a & b')</script>"


def parsed():
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def imports(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").partition(".")[0]


def test_the_package_imports_nothing_that_executes_data():
    found = {(name, module) for name, tree in parsed() for module in imports(tree) if module in UNSAFE_MODULES}
    assert not found


def calls(tree):
    """(name of the function, its call): bare names, and attributes of modules that run programs."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id, node
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = ast.unparse(node.func.value)
            if owner in ("os", "builtins", "np", "numpy") or node.func.attr == "exec_module":
                yield node.func.attr, node


def test_the_package_evaluates_no_text():
    found = [(name, call) for name, tree in parsed() for call, _ in calls(tree) if call in UNSAFE_CALLS]
    assert not found
    assert {name for name, tree in parsed() for call, _ in calls(tree) if call == "exec_module"} <= CODE
    assert "Python code" in (default.__doc__ or "")


def test_arrays_are_loaded_without_pickle():
    """NumPy's default is allow_pickle=False; nothing sets it to anything else."""
    for name, tree in parsed():
        for call, node in calls(tree):
            given = [k.value for k in node.keywords if k.arg == "allow_pickle"] if call == "load" else []
            assert all(isinstance(value, ast.Constant) and value.value is False for value in given), name


def test_archives_are_unpacked_within_bounds():
    """By files.read_npz, which looks at sizes first. Others list names, map .npy files, or read the embedded digits."""
    loads = ((name, ast.unparse(node.func)) for name, tree in parsed() for call, node in calls(tree) if call == "load")
    found = {name for name, function in loads if function == "np.load"}
    assert found == {"files.py", "evaluation/frechet.py", "data/memory.py", "data/prompts.py"}


def test_every_part_of_a_page_is_escaped():
    """Captions, names of classes and samplers, titles."""
    pixels, points = np.zeros((4, 4, 3), np.uint8), np.zeros((3, 2), np.float32)
    parts = [
        pages.table([HOSTILE], [[HOSTILE]]),
        pages.image(pixels, HOSTILE),
        pages.paragraph(HOSTILE),
        pages.heading(HOSTILE),
        pages.folded(HOSTILE),
        pages.strips({HOSTILE: pixels}),
        pages.bars({HOSTILE: (1.0, "one")}),
        pages.bars({"one": (1.0, HOSTILE)}),
        pages.plot([pages.Series(HOSTILE, [(1.0, 1.0)])], "x", "y"),
        pages.plot([], "x", "y", {HOSTILE: 1.0}),
        pages.scatter(points, HOSTILE),
        pages.page(HOSTILE),
    ]
    assert all("<script" not in part and "&lt;script&gt;" in part for part in parts)


def test_a_report_is_escaped(tmp_path, capsys):
    row = {
        "sampler": HOSTILE,
        "NFE": 1,
        "distance": 1.0,
        "recall": 1.0,
        "accuracy": 1.0,
        "images_per_second": 1.0,
        "grid": np.zeros((4, 4, 3), np.uint8),
        "strip": np.zeros((4, 4, 3), np.uint8),
        "protocol": {"feature_sha256": HOSTILE, "samples": 1, "reference_samples": HOSTILE, "seed": 0},
    }
    quickstart.write_report(tmp_path, default.get_config(), [row], {HOSTILE: 1.0})
    page = (tmp_path / "report.html").read_text()
    assert "<script" not in page and page.count("&lt;script&gt;") == 7
    assert "report.html" in capsys.readouterr().out


@pytest.mark.parametrize("size", [2**63 - 1, 2**40, 200_000_000])
def test_a_header_larger_than_its_file(tmp_path, size):
    (tmp_path / "x.safetensors").write_bytes(size.to_bytes(8, "little") + b"{}")
    for read in (files.read, files.names, files.metadata):
        with pytest.raises(ValueError, match=r"x\.safetensors is damaged or truncated"):
            read(tmp_path / "x.safetensors")
