"""The shape of the package in numbers: import cycles, sizes, symlinks, untyped places. Each has a limit."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "jaxdiff"
MAX_FILE, MAX_FUNCTION, MAX_ANY = 350, 80, 20  # lines, lines, per 1,000 lines
FILES = sorted(path for folder in (PACKAGE, ROOT / "configs") for path in folder.rglob("*.py"))


def module_name(path):
    """jaxdiff.a.b of a file of the package; that of a package is its folder's."""
    base = "jaxdiff.configs" if path.is_relative_to(ROOT / "configs") else "jaxdiff"
    folder = ROOT / "configs" if base == "jaxdiff.configs" else PACKAGE
    parts = path.relative_to(folder).with_suffix("").parts
    return ".".join((base, *(part for part in parts if part != "__init__")))


def imports(path):
    """The modules of the package that a file names in any import, also inside functions."""
    names = {module_name(other) for other in FILES}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [name if name in names else node.module for name in found]
        else:
            continue
        yield from (name for name in found if name.split(".")[0] == "jaxdiff" and name != "jaxdiff")


def subpackage(module):
    """jaxdiff.a of jaxdiff.a.b: a folder or a single file."""
    return ".".join(module.split(".")[:2])


def cycles(edges):
    """Groups of nodes that can reach each other."""

    def reach(start):
        seen, stack = set(), [start]
        while stack:
            for other in edges.get(stack.pop(), ()):
                if other not in seen:
                    seen.add(other)
                    stack.append(other)
        return seen

    reached = {node: reach(node) for node in edges}
    return sorted(node for node in edges if node in reached[node])


def test_no_subpackages_import_each_other():
    edges = {}
    for path in FILES:
        own = subpackage(module_name(path))
        for name in imports(path):
            if subpackage(name) != own:
                edges.setdefault(own, set()).add(subpackage(name))
    assert cycles(edges) == []


def test_cycles_are_found():
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == ["b", "c"]


@pytest.mark.parametrize("path", FILES, ids=[module_name(path) for path in FILES])
def test_files_and_functions_are_short(path):
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= MAX_FILE
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < MAX_FUNCTION, node.name


def test_there_are_no_symlinks():
    listed = subprocess.run(["git", "ls-files", "-s"], capture_output=True, text=True, cwd=ROOT).stdout.splitlines()
    assert [line for line in listed if line.startswith("120000")] == []


def test_few_places_are_untyped():
    text = "".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    count = len(re.findall(r"\bAny\b", text)) - len(re.findall(r"import .*\bAny\b", text))
    assert 1000 * count / text.count("\n") <= MAX_ANY
