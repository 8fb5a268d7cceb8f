"""The site: it builds without a warning and without network, shows every public name, and no link in it is broken.

One test, because tests of a module may run in different processes and the build takes seconds.
"""

import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
import types
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from doc_blocks import ROOT
from sphinx.util.inventory import InventoryFile

import jaxdiff


def test_the_site_builds_is_complete_and_links_to_what_exists(tmp_path):
    source, out = tmp_path / "repository", tmp_path / "site"
    for name in ("docs", "notebooks"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("_build", ".*"))
    shutil.copy(ROOT / "CHANGELOG.md", source)  # a page of the site includes it
    build(source / "docs", out)
    with open(out / "objects.inv", "rb") as file:
        inventory = InventoryFile.load(file, "", os.path.join)
    assert missing(inventory) == []
    read = {path: Page(path) for path in out.rglob("*.html") if "_static" not in path.parts}  # templates of the theme
    assert len(read) > 40
    assert broken(out, read) == []
    index = (out / "searchindex.js").read_text(encoding="utf-8")
    assert "immisc" in index and "linear_assign" in index  # stems of words, and names of the reference


def build(source: Path, out: Path) -> None:
    """In a process without a proxy or a name server, so that nothing can be fetched; warnings are errors."""
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "http_proxy": "http://127.0.0.1:9",
        "https_proxy": "http://127.0.0.1:9",
    }
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", out.parent / "doctrees", source, out]
    done = subprocess.run(command, env=env, cwd=source.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-8000:]


def public_names() -> dict[str, object]:
    """Every public name of every public module."""
    found = {"jaxdiff.load": jaxdiff.load}
    for module_name in jaxdiff.__all__:
        module = importlib.import_module(f"jaxdiff.{module_name}")
        own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        for name in getattr(module, "__all__", [name for name in own if not name.startswith("_")]):
            found[f"{module.__name__}.{name}"] = getattr(module, name)
    return found


def missing(inventory) -> list[str]:
    """Public names without an entry: a module counts as a module, the rest as what they are."""
    entries = {name for kind, names in inventory.items() if kind.startswith("py:") for name in names}
    return [name for name, value in public_names().items() if _full(name, value) not in entries]


def _full(name: str, value: object) -> str:
    return value.__name__ if isinstance(value, types.ModuleType) else name


class Page(HTMLParser):
    """The targets and the links of a built page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids |= {given[name] for name in ("id", "name") if given.get(name)}
        for name in ("href", "src"):
            if given.get(name):
                self.links.append(given[name])


def broken(out: Path, read: dict[Path, Page]) -> list[str]:
    """Links within the site whose file or anchor is missing."""
    found = []
    for path, page in read.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or link == "#":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            if not target.exists() or (anchor and target in read and anchor not in read[target].ids):
                found.append(f"{path.relative_to(out)} -> {link}")
    return found


def test_public_functions_and_classes_say_what_they_are():
    """A docstring of its own, whose first line is a sentence."""
    for name, value in public_names().items():
        if inspect.isfunction(value) or inspect.isclass(value):
            text = value.__doc__ or ""
            assert re.match(r"\S.{15}", text), name
            assert not text.startswith(f"{value.__name__}("), name  # what a dataclass writes by itself


def test_a_name_without_an_entry_is_found():
    assert "jaxdiff.solvers.solve" in missing({"py:function": {}})
