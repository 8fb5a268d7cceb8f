"""The documentation site: `pip install ".[docs]"`, then `python -m sphinx -W docs site`."""

import importlib
import inspect
import re
import shutil
import sys
import typing
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import jaxdiff  # noqa: E402

project = "jaxdiff"
author = "the jaxdiff authors"
release = jaxdiff.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
html_theme = "sphinx_book_theme"
html_title = f"jaxdiff {release}"
html_theme_options = {"show_toc_level": 2, "home_page_in_toc": True, "use_download_button": False}
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False

nb_execution_mode = "off"  # notebooks carry their outputs; the tests execute them
nb_render_markdown_format = "myst"  # tables in outputs, too
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
autodoc_typehints = "signature"  # with jaxtyping's shapes
python_maximum_signature_line_length = 88
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
exclude_patterns = ["_build"]
suppress_warnings = ["myst.header", "misc.highlighting_failure"]


def as_restructured_text(app, what, name, obj, options, lines):
    """Docstrings are plain text: `code` in backticks, equations indented by four. reStructuredText marks both twice.

    Sections that napoleon reads (Args, Returns, Raises, Example) keep their form.
    """
    section = literal = False
    out = []
    for line in lines:
        indented = line.startswith("    ")
        if re.fullmatch(r"(Args|Returns|Raises|Example|Examples|Note):", line):
            section, literal = True, False
        elif line and not line.startswith(" "):
            section = False
        if section and not line.lstrip().startswith(">>>"):
            line = _escaped(line)
        elif indented and not section and not literal:
            if out and out[-1]:
                out.append("")
            out += ["::", ""]
            literal = True
        elif not indented and not section:
            if literal and line:
                out.append("")
                literal = False
            line = _escaped(line)
        out.append(line)
    lines[:] = out


def _escaped(line):
    """One line of prose: single backticks become code, and characters that mark up text stand for themselves."""
    parts = re.split(r"(``.*?``|`.*?`)", line)
    for i, part in enumerate(parts):
        if part.startswith("`"):
            parts[i] = "``" + part.strip("`") + "``"
        else:
            parts[i] = re.sub(r"([*|]|(?<=\w)_(?=\W|$))", r"\\\1", part)
    return "".join(parts)


def add_reference(app, docname, source):
    """Append the entries of every public name to the page of its module, docs/api/NAME.md."""
    folder, _, name = docname.rpartition("/")
    if folder == "api" and name in jaxdiff.__all__:
        source[0] += reference(importlib.import_module(f"jaxdiff.{name}"))


def reference(module):
    """The reference of a module: functions and classes, then registries and types, then modules that are public."""
    named = {name: getattr(module, name) for name in getattr(module, "__all__", ())}
    lines = [f".. automodule:: {module.__name__}", "   :members:"]
    lines += ["   :imported-members:"] * bool(named)
    for name, value in named.items():
        if isinstance(value, dict | tuple):
            lines += ["", f".. autodata:: {module.__name__}.{name}", "   :no-value:"]
        elif typing.get_origin(value) is not None:
            lines += ["", f".. py:data:: {name}", f"   :module: {module.__name__}", "", "   A type of this module."]
    text = "\n".join(["\n```{eval-rst}", *lines, "```\n"])
    entries = [_entry(value) for value in named.values() if inspect.ismodule(value)]
    return text + ("\n## Modules\n\n```{eval-rst}\n" + "\n".join(entries) + "\n```\n" if entries else "")


def _entry(module):
    """A public module: of a network its docstring, of a method what it is built with, of others everything."""
    parts = [name for name in ("Options", "build", "e_step", "m_step") if hasattr(module, name)]
    members = ", ".join(parts) if module.__name__.startswith("jaxdiff.methods.") else ""
    option = "" if module.__name__.startswith("jaxdiff.models.") else f"   :members: {members}\n"
    return f".. automodule:: {module.__name__}\n{option}"


def skip_fields(app, what, name, obj, skip, options):
    """Fields of a NamedTuple stand in its signature; what they have for a docstring says nothing."""
    return True if (getattr(obj, "__doc__", "") or "").startswith("Alias for field number") else None


def without_builtins(app):
    """An instance of a built-in type among the public names has no source to show."""
    getattr(app.env, "_viewcode_modules", {}).pop("builtins", None)
    return []


def copy_notebooks(app):
    """The notebooks of the repository as pages of the site."""
    target = Path(app.srcdir) / "notebooks"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(ROOT / "notebooks", target, ignore=shutil.ignore_patterns(".*", "*.py", "__pycache__"))


def setup(app):
    app.connect("builder-inited", copy_notebooks, priority=100)
    app.connect("source-read", add_reference)
    app.connect("html-collect-pages", without_builtins, priority=100)
    app.connect("autodoc-skip-member", skip_fields)
    app.connect("autodoc-process-docstring", as_restructured_text, priority=100)
