"""Finding, listing and describing configs on the command line."""

from __future__ import annotations

import ast
import importlib.util
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jaxdiff.configs
from jaxdiff import comments, remote
from jaxdiff.cli.flags import Arguments, Command, UsageError
from jaxdiff.errors import nearest

if TYPE_CHECKING:
    from ml_collections import ConfigDict

FOLDER = Path(next(iter(jaxdiff.configs.__path__)))
MODULE = "jaxdiff_config"  # what a config file is loaded as


def names() -> list[str]:
    """The installed configs."""
    return sorted(path.stem for path in FOLDER.glob("[!_]*.py"))


def find(name: str) -> Path:
    """The file of an installed config or a path; configs/digits.py means digits wherever it is installed."""
    path = Path(name)
    if path.is_file():
        return path
    if path.stem not in names():
        known = [*names(), *recipes()]
        raise UsageError(
            f"no config {name}{nearest(path.stem, known)}; choose one of {', '.join(names())}, pass a file, or distil "
            f"a run with one of {', '.join(recipes())}"
        )
    return FOLDER / f"{path.stem}.py"


def recipes() -> list[str]:
    """The methods whose config is inherited from a teacher: rows of METHODS with a recipe, read without running it."""
    tree = ast.parse((Path(jaxdiff.__file__).parent / "methods" / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "METHODS":
            assert isinstance(node.value, ast.Dict)
            rows = zip(node.value.keys, node.value.values, strict=True)
            return [ast.literal_eval(name) for name, row in rows if name and _has_recipe(row)]
    return []


def _has_recipe(row: ast.expr) -> bool:
    return isinstance(row, ast.Call) and any(keyword.arg == "recipe" for keyword in row.keywords)


def inherited(given: str, overrides: Sequence[tuple[str, str]]) -> ConfigDict:
    """The config of METHOD[:ARGUMENT], inherited from the teacher that the overrides name."""
    method, _, argument = given.partition(":")
    named = dict(overrides)
    if not named.get("teacher.path"):
        raise UsageError(
            f"--config={given} distils a teacher: give the workdir of its run with --config.teacher.path=RUN, or a "
            "network of your own with --config.teacher.kind=python --config.teacher.path=FILE.py:load"
        )
    from jaxdiff.cli import runs

    return runs.inherited(method, argument, named.get("teacher.kind", "run"), named["teacher.path"], overrides)


def load(given: str) -> ConfigDict:
    """The config of NAME[:ARGUMENT]."""
    name, _, argument = given.partition(":")
    spec = importlib.util.spec_from_file_location(MODULE, find(name))
    if spec is None or spec.loader is None:
        raise UsageError(f"--config={name} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module  # where a run looks up the file of a network that the config registers
    spec.loader.exec_module(module)
    if not hasattr(module, "get_config"):
        raise UsageError(f"{name} has no function get_config(arg='') that returns a ConfigDict")
    config = module.get_config(argument) if argument else module.get_config()
    config.lock()
    return config


def resolve(command: Command, given: Arguments) -> ConfigDict:
    """The config of --config or of the run in --workdir, with the overrides applied."""
    workdir = str(given.values.get("workdir", ""))
    if given.config is not None and command.config == "run":
        raise UsageError(f"{given.command} reads the config of the run in --workdir; set keys with --config.KEY=VALUE")
    name = (given.config or "").partition(":")[0]
    inherits = name in recipes() and not Path(name).is_file()
    if inherits:
        assert given.config is not None
        config = inherited(given.config, given.overrides)
    elif given.config is not None:
        config = load(given.config)
    else:
        config = _of_run(command, given.command, workdir)
    if given.overrides:
        from jaxdiff.cli.options import override

        override(config, given.overrides)
    if inherits and "optim.decay_images" not in dict(given.overrides):
        config.optim.decay_images = config.data.batch_size * config.train.steps  # of the steps that were asked for
    return config


def _of_run(command: Command, name: str, workdir: str) -> ConfigDict:
    if command.config == "file" and not (workdir and remote.exists(workdir, "config.json")):
        resume = f"; there is no run in {workdir} to resume" if workdir else ""
        raise UsageError(f"{name} needs --config=NAME[:ARGUMENT], see `jaxdiff configs`{resume}")
    if not workdir:
        raise UsageError("give --workdir=FOLDER, the folder of a run")
    from jaxdiff.cli import runs

    return runs.read_config(workdir)


# ------------------------------------------------------------------------------------------ lists


def summary(path: Path) -> tuple[str, dict[str, str]]:
    """The first paragraph of a config's docstring and its ARGUMENTS, read without running it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    purpose = " ".join((ast.get_docstring(tree) or "").split("\n\n")[0].split())
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(node, ast.Assign | ast.AnnAssign) and getattr(target, "id", "") == "ARGUMENTS" and node.value:
            return purpose, ast.literal_eval(node.value)
    return purpose, {}


def listing() -> str:
    """What `jaxdiff configs` prints."""
    lines = []
    for name in names():
        purpose, arguments = summary(FOLDER / f"{name}.py")
        lines += textwrap.wrap(f"{name:24s} {purpose}", 118, subsequent_indent=" " * 25)
        lines += [f"{'':25s}:{argument:14s} {change}" for argument, change in arguments.items()]
    lines += ["", "Use one with --config=NAME or --config=NAME:ARGUMENT; some take several: NAME:A,B."]
    methods = (
        "Distil a run without a config of its own: --config=METHOD --config.teacher.path=RUN, METHOD one of "
        f"{', '.join(recipes())}; sfd:4 has 4 evaluations."
    )
    return "\n".join([*lines, *textwrap.wrap(methods, 118)])


def describe(config: ConfigDict) -> str:
    """Every key of a config with its value and comment."""
    from jaxdiff.cli import options

    known = _comments(config)
    lines = ["Keys of this config, with values and comments:"]
    order = list(known)  # as default.py has them
    for key in sorted(options.keys(config), key=lambda key: order.index(key) if key in known else len(order)):
        value: Any = config
        for part in key.split("."):
            value = value[part]
        lines += _entry(f"  --config.{key}={value}", known.get(key, ""))
    for section in options.OWNERS:
        more = options.unlisted(config, section)
        if more:
            lines += _entry(f"  --config.{section}.NAME", f"also takes {', '.join(more)}")
    return "\n".join(lines)


def key_comments() -> dict[str, str]:
    """The keys of the default config and of the methods' options with their comments, read without running anything."""
    known = comments.key_comments(FOLDER / "default.py")
    return known | comments.option_comments(Path(jaxdiff.__file__).parent / "methods")


def _comments(config: ConfigDict) -> dict[str, str]:
    """The comments of the default config, of the methods' options and of the chosen model's fields."""
    from jaxdiff.cli import runs
    from jaxdiff.models import find as find_model

    known = key_comments()
    declared = {**runs.method_options(), "model.fields": find_model(config.model.name)}
    for section, cls in declared.items():
        known |= {f"{section}.{name}": text for name, text in comments.field_comments(cls).items()}
    return known


def _entry(left: str, comment: str) -> list[str]:
    if len(left) > 46:
        return [left, *textwrap.wrap(comment, 118, initial_indent=" " * 48, subsequent_indent=" " * 48)]
    return textwrap.wrap(f"{left:47s} {comment}", 118, subsequent_indent=" " * 48, drop_whitespace=True)
