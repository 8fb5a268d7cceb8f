"""Code from outside the package, named FILE.py:NAME or package.module:NAME: networks, teachers, feature networks.

A run that uses such code copies the file into its workdir (code/FILE.py) and records the hash, so that it can be
sampled where the original is gone. Code of an importable package is recorded by name alone.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = "code"  # of a workdir, where copies lie


def is_reference(name: str) -> bool:
    """Whether a name is FILE.py:NAME or package.module:NAME."""
    place, colon, attribute = name.rpartition(":")
    return bool(colon and place and attribute.isidentifier())


def split(reference: str) -> tuple[str, str]:
    """The file or module, and the name in it."""
    if not is_reference(reference):
        raise ValueError(f"expected FILE.py:NAME or package.module:NAME, got {reference!r}")
    place, _, attribute = reference.rpartition(":")
    return place, attribute


def file_of(reference: str) -> Path | None:
    """The file of FILE.py:NAME; None for a module."""
    place, _ = split(reference)
    return Path(place).expanduser() if place.endswith(".py") else None


def attribute(reference: str, sha256: str = "") -> Any:
    """What a reference names. The file is executed once per content; `sha256` refuses one that has changed."""
    place, name = split(reference)
    file = file_of(reference)
    found = module(place) if file is None else imported(file, sha256)
    if not hasattr(found, name):
        known = [other for other in vars(found) if not other.startswith("_")]
        raise ValueError(f"{place} has no {name!r}; it defines {', '.join(known) or 'nothing'}")
    return getattr(found, name)


def module(name: str) -> ModuleType:
    """An importable module."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"cannot import {name}: {error}; install the package, or put its folder on PYTHONPATH"
        ) from error


def imported(file: Path, sha256: str = "") -> ModuleType:
    """A Python file as a module; its own folder is searched for what it imports."""
    file = Path(file).absolute()
    if not file.is_file():
        raise FileNotFoundError(f"no Python file at {file}")
    found = digest(file)
    if sha256 and found != sha256:
        raise ValueError(
            f"{file} has changed since the run began (sha256 {found[:12]}, recorded {sha256[:12]}); use the copy in "
            f"the run's folder {FOLDER}/, or start a new run"
        )
    name = f"jaxdiff_outside_{file.stem}_{found[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        with _searched(file.parent):
            spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        del sys.modules[name]
        raise ModuleNotFoundError(
            f"{file} imports {error.name}, which is not there: install it, or put its file beside {file.name}"
        ) from error
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextmanager
def _searched(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def digest(file: Path) -> str:
    """sha256 of a file."""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def reference_to(value: Any) -> str:
    """FILE.py:NAME or module:NAME of a class or function; "" if it cannot be found again, as one made in a notebook."""
    name, module = getattr(value, "__qualname__", ""), sys.modules.get(getattr(value, "__module__", ""))
    if not name.isidentifier() or module is None:
        return ""
    try:
        file = inspect.getsourcefile(value)
    except (TypeError, OSError):
        return ""
    if "." in module.__name__ and module.__name__.split(".")[0] in sys.modules:
        return f"{module.__name__}:{name}"
    return f"{file}:{name}" if file and _defines(Path(file), name) else ""


def _defines(file: Path, name: str) -> bool:
    """Whether a Python file defines a class or function of that name at its top level."""
    if file.suffix != ".py" or not file.is_file():
        return False
    body = ast.parse(file.read_text(encoding="utf-8")).body
    return any(isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name for node in body)


# ------------------------------------------------------------------------------------------ copies in a workdir


def keep(reference: str, workdir: Path) -> tuple[str, str]:
    """Copy the file of a reference into the workdir: the reference to the copy, relative to it, and the hash."""
    file = file_of(reference)
    if file is None:
        return reference, ""
    if not file.is_file():
        raise FileNotFoundError(f"no Python file at {file.absolute()}")
    found = digest(file)
    copy = Path(workdir) / FOLDER / file.name
    if copy.is_file() and digest(copy) != found:
        copy = copy.with_stem(f"{file.stem}_{found[:8]}")
    if not copy.is_file():
        copy.parent.mkdir(parents=True, exist_ok=True)
        part = copy.with_suffix(".part")
        shutil.copyfile(file, part)
        part.replace(copy)
    return f"{FOLDER}/{copy.name}:{split(reference)[1]}", found


def located(reference: str, workdir: Path, sha256: str = "") -> str:
    """A reference as `keep` recorded it, with the place of the copy in this workdir."""
    if not reference.startswith(f"{FOLDER}/"):
        return reference
    found = str(Path(workdir) / reference)
    file = file_of(found)
    assert file is not None
    if not file.is_file():
        raise FileNotFoundError(f"the network of this run is defined in {file}, which is missing; restore that copy")
    if sha256 and digest(file) != sha256:
        raise ValueError(
            f"{file} has changed since the run wrote it; restore it, or, to use it as it is, set model.sha256 to "
            '"" in config.json and remove its line "checksum"'
        )
    return found
