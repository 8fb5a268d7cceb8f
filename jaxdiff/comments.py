"""Comments of config keys and of dataclass fields, read from the source that declares them."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import textwrap
import tokenize
from collections.abc import Iterable
from pathlib import Path


def key_comments(path: Path) -> dict[str, str]:
    """The comment of every `c.section.key = value  # comment` in a config file, by "section.key"."""
    source = path.read_text(encoding="utf-8")
    named = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            named.append((ast.unparse(node.targets[0]).partition(".")[2], node))
    return _comments(source, named)


def field_comments(cls: type) -> dict[str, str]:
    """The comment of every field of a dataclass, its own and inherited ones; "" for those without.

    Fields of a field that is a dataclass itself are named "field.inner".
    """
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            try:
                source = textwrap.dedent(inspect.getsource(base))
            except OSError:  # a class without a source of its own, such as models.Plain makes
                continue
            (body,) = ast.parse(source).body
            assert isinstance(body, ast.ClassDef)
            found |= _comments(source, _fields(body))
    for field in dataclasses.fields(cls):
        made = field.default_factory
        if isinstance(made, type) and dataclasses.is_dataclass(made):
            inner = field_comments(made)
            found.pop(field.name, None)
            found |= {f"{field.name}.{name}": text for name, text in inner.items()}
    return found


def option_comments(folder: Path) -> dict[str, str]:
    """The field comments of the class `Options` in each module of a folder, by "module.field".

    The modules are parsed, not imported; base and nested classes are looked up by name in the same folder.
    """
    classes: dict[str, tuple[str, ast.ClassDef]] = {}
    methods = []
    for path in sorted(folder.glob("*.py")):
        source = path.read_text(encoding="utf-8")
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef):
                name = f"{path.stem}.Options" if node.name == "Options" else node.name
                classes[name] = source, node
                methods += [path.stem] if node.name == "Options" else []

    def of(name: str) -> dict[str, str]:
        source, node = classes[name]
        found: dict[str, str] = {}
        for base in reversed(node.bases):
            if ast.unparse(base) in classes:
                found |= of(ast.unparse(base))
        found |= _comments(source, _fields(node))
        for field, statement in _fields(node):
            kind = ast.unparse(statement.annotation)
            if kind in classes:
                del found[field]
                found |= {f"{field}.{inner}": text for inner, text in of(kind).items()}
        return found

    return {f"{method}.{name}": text for method in methods for name, text in of(f"{method}.Options").items()}


def _fields(node: ast.ClassDef) -> list[tuple[str, ast.AnnAssign]]:
    """The annotated names of a class."""
    return [(ast.unparse(part.target), part) for part in node.body if isinstance(part, ast.AnnAssign)]


def _comments(source: str, named: Iterable[tuple[str, ast.stmt]]) -> dict[str, str]:
    """The comment on each statement, and indented continuation lines (`#   more`) below it."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    written = {token.start[0]: token for token in tokens if token.type == tokenize.COMMENT}
    found = {}
    for name, node in named:
        last = node.end_lineno or node.lineno
        lines = [line for line in range(node.lineno, last + 1) if line in written]
        while last + 1 in written and written[last + 1].line.lstrip().startswith("#  "):
            last += 1
            lines.append(last)
        found[name] = " ".join(written[line].string.lstrip("# ").strip() for line in lines)
    return found
