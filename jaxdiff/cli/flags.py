"""Commands and flags: declarations, parsing, --help."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from jaxdiff.errors import nearest

TRUE, FALSE = ("true", "yes", "1"), ("false", "no", "0")
Value: TypeAlias = bool | int | float | str


class UsageError(ValueError):
    """An invalid command line."""


@dataclass(frozen=True)
class Flag:
    """--name, of the type of its default; `help` is one line."""

    name: str
    default: Value
    help: str
    values: tuple[str, ...] = ()  # for shell completion


@dataclass(frozen=True)
class Command:
    """One command, implemented by `run(arguments)`.

    `config` says where its config comes from: "" (it takes none), "file" (--config), "run" (the run in --workdir), or
    "either".
    """

    purpose: str
    run: Callable[[Arguments], int]
    flags: tuple[Flag, ...] = ()
    config: str = ""
    examples: tuple[str, ...] = ()
    words: tuple[str, ...] = ()  # choices of its positional argument


@dataclass
class Arguments:
    """A parsed command line."""

    command: str
    values: dict[str, Value]
    config: str | None = None  # of --config
    overrides: list[tuple[str, str]] = field(default_factory=list)  # of --config.KEY, in order
    words: list[str] = field(default_factory=list)  # positional arguments
    help: bool = False

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["values"][name]
        except KeyError:
            raise AttributeError(f"{self.__dict__.get('command')} has no flag {name!r}") from None


def parse(name: str, command: Command, arguments: Sequence[str]) -> Arguments:
    """The flags of a command; --flag=value and --flag value are the same, and so are --dry-run and --dry_run."""
    flags = {flag.name: flag for flag in command.flags}
    found = Arguments(name, {flag.name: flag.default for flag in command.flags})
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument in ("-h", "--help"):
            found.help = True
        elif not argument.startswith("--"):
            found.words.append(argument)
        else:
            _read(found, flags, command, argument[2:], rest)
    if len(found.words) > (1 if command.words else 0):
        raise UsageError(f"{found.words[-1]!r} is not a flag: write options as --name=value")
    return found


def _read(found: Arguments, flags: dict[str, Flag], command: Command, argument: str, rest: list[str]) -> None:
    """One argument, given without its dashes; its value is taken from `rest` where it has none."""
    given, equals, value = argument.partition("=")
    name = given.replace("-", "_")
    if command.config and (name == "config" or name.startswith("config.")):
        text = value if equals else _next(rest)
        if name == "config":
            found.config = _required(given, text)
        else:
            found.overrides.append((name.removeprefix("config."), "true" if text is None else text))
    elif name in flags and isinstance(flags[name].default, bool):
        found.values[name] = read_value(value, True, f"--{given}") if equals else True
    elif name.startswith("no") and not equals and isinstance(getattr(flags.get(name[2:]), "default", None), bool):
        found.values[name[2:]] = False
    elif name in flags:
        text = _required(given, value if equals else _next(rest))
        found.values[name] = _not_below(read_value(text, flags[name].default, f"--{given}"), flags[name])
    else:
        known = [*flags, *(["config"] if command.config else []), "help", "traceback"]
        raise UsageError(f"unknown flag --{given}{nearest(name, known)}; `jaxdiff {found.command} --help` lists flags")


def _not_below(value: Value, flag: Flag) -> Value:
    """Numbers are finite and not negative, unless their default is."""
    if isinstance(value, str | bool) or isinstance(flag.default, str | bool):
        return value
    least = min(0, flag.default)
    if not least <= value < math.inf:
        raise UsageError(f"--{flag.name} must be at least {least:g} and finite, got {value}")
    return value


def _next(rest: list[str]) -> str | None:
    """The argument that follows, unless it is a flag; negative numbers are values."""
    return rest.pop(0) if rest and not rest[0].startswith("--") else None


def _required(name: str, text: str | None) -> str:
    if text is None:
        raise UsageError(f"--{name} needs a value: --{name}=VALUE")
    return text


def read_value(text: str, like: Value, what: str) -> Value:
    """The text as a value of the type of `like`: bool, int, float or str."""
    try:
        if isinstance(like, bool):
            return _boolean(text)
        if isinstance(like, int):
            return int(text)
        return float(text) if isinstance(like, float) else text
    except ValueError:
        raise UsageError(f"{what}={text} is invalid: expected {_kind(like)}, for example {like!r}") from None


def _boolean(text: str) -> bool:
    if text.lower() not in TRUE + FALSE:
        raise ValueError(f"expected true or false, got {text!r}")
    return text.lower() in TRUE


def _kind(like: Value) -> str:
    if isinstance(like, bool):
        return "true or false"
    return {int: "an integer", float: "a number"}.get(type(like), "text")


# ------------------------------------------------------------------------------------------ files


def check_local(flag: str, path: str) -> None:
    """Files are opened by the operating system, so gs://bucket/x would become a local folder `gs:`."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", path):
        raise UsageError(f"--{flag}={path} is a URL; give a local path, or mount the bucket and give its mount point")


def check_out(path: str, *suffixes: str) -> None:
    """An output file has one of the suffixes, if any are given, and its folder exists."""
    check_local("out", path)
    if suffixes and Path(path).suffix not in suffixes:
        raise UsageError(f"--out must end in {' or '.join(suffixes)}, got {path!r}")
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise UsageError(f"--out={path}: the folder {folder} does not exist; create it first")


def check_count(count: int, least: int = 1) -> None:
    """Check --count."""
    if count < least:
        raise UsageError(f"--count must be at least {least}, got {count}")


# ------------------------------------------------------------------------------------------ help


def describe(name: str, command: Command) -> str:
    """What `jaxdiff NAME --help` prints."""
    word = f" {'|'.join(command.words)}" if command.words else ""
    lines = [f"jaxdiff {name}{word} [--flag=value ...]", "", command.purpose, "", "Flags:"]
    flags = [*command.flags, *CONFIG_FLAGS.get(command.config, ()), *COMMON_FLAGS]
    lines += [line for flag in flags for line in _described(flag)]
    if command.config:
        lines += ["", *textwrap.wrap(KEYS, 110)]
    if command.examples:
        lines += ["", "Examples:", *(f"  {example}" for example in command.examples)]
    return "\n".join(lines)


def _described(flag: Flag) -> list[str]:
    left = f"  --{flag.name}" if isinstance(flag.default, bool) else f"  --{flag.name}={flag.default}"
    lines = textwrap.wrap(flag.help, 82)
    if len(left) > 28:
        return [left, *(" " * 30 + line for line in lines)]
    return [f"{left:30s}{lines[0]}", *(" " * 30 + line for line in lines[1:])]


TEACHER = (
    Flag("teacher", "", "a teacher instead of a run: FILE.py:load, a workdir, or a weights file with --kind"),
    Flag("kind", "", "of the teacher's weights file: edm, dit, sd_unet...; empty: a Python file or a run"),
)
KEYS = (
    "Config keys are documented in jaxdiff/configs/default.py, one comment each; `jaxdiff train --config=NAME --help` "
    "lists those of a config with their values, `jaxdiff configs` the configs. A field of the chosen model, "
    "solver, optimizer or data source can be set even if the config does not list it, for example "
    "--config.model.fields.num_classes=0."
)
COMMON_FLAGS = (
    Flag("help", False, "print this help; with --config=NAME, also the config's keys"),
    Flag("traceback", False, "show the traceback of an error, not only its message"),
)
_KEY = Flag("config.KEY", "VALUE", "set a key of the config")
CONFIG_FLAGS = {
    "file": (Flag("config", "NAME[:ARGUMENT]", "an installed config (see `jaxdiff configs`) or a Python file"), _KEY),
    "run": (_KEY,),
    "either": (Flag("config", "NAME[:ARGUMENT]", "a config, if there is no run in --workdir"), _KEY),
}
