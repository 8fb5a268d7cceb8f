"""The command line. Commands import JAX only when they run, so that help, lists and completion are fast."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import jaxdiff
from jaxdiff.cli import (
    check,
    compare,
    complete,
    configs,
    ema,
    evaluate,
    features,
    huge_pages,
    no_tpu,
    plan,
    push,
    sample,
    stats,
    train,
)
from jaxdiff.cli.flags import Arguments, Command, Flag, UsageError, check_local, describe, parse
from jaxdiff.errors import nearest, raised_on_purpose

COMPUTING = ("quickstart", "train", "sample", "evaluate", "compare")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; errors that jaxdiff raises become one line and exit code 2, others show their traceback."""
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = [argument for argument in given if argument != "--traceback"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] in ("--version", "version"):
        print(f"jaxdiff {jaxdiff.__version__}")
        return 0
    if argv is None and arguments[0] in COMPUTING:
        huge_pages.restart()
    no_tpu.quiet()
    try:
        return run(arguments)
    except BrokenPipeError:  # the reader, such as head, closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print(f"jaxdiff {arguments[0]}: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if not raised_on_purpose(error, ("jaxdiff", configs.MODULE)):
            raise
        if "--traceback" in given:
            traceback.print_exc()
        print(f"jaxdiff {arguments[0]}: {error}", file=sys.stderr)
        return 2


def run(arguments: list[str]) -> int:
    """Find the command and run it, or print its help."""
    if arguments[0] == "__complete":
        print("\n".join(complete.candidates(arguments[1], arguments[2], COMMANDS)))
        return 0
    name = next((known for known in COMMANDS if arguments[: len(known.split())] == known.split()), "")
    if not name:
        return _group(arguments)
    command = COMMANDS[name]
    given = parse(name, command, arguments[len(name.split()) :])
    if not given.help:
        return command.run(given)
    print(describe(name, command))
    if given.config is not None:
        print("\n" + configs.describe(configs.resolve(command, given)))
    return 0


def _group(arguments: list[str]) -> int:
    """The first word is not a command: a typo, or the name of a group of commands."""
    first, second = arguments[0], arguments[1] if len(arguments) > 1 else ""
    prefix = f"{first} "
    actions = {name.removeprefix(prefix): c for name, c in COMMANDS.items() if name.startswith(prefix)}
    if not actions:
        names = list(dict.fromkeys(name.split()[0] for name in COMMANDS))
        raise UsageError(f"unknown command {first!r}{nearest(first, names)}; choose one of {', '.join(names)}")
    if second not in ("-h", "--help"):
        raise UsageError(f"{first} needs one of {', '.join(actions)}, got {second!r}{nearest(second, actions)}")
    print("\n".join(f"jaxdiff {first} {name:10s} {command.purpose}" for name, command in actions.items()))
    return 0


def usage() -> str:
    """What `jaxdiff --help` prints."""
    lines = ["jaxdiff COMMAND [--flag=value ...]", ""]
    lines += [f"  {name:18s} {command.purpose}" for name, command in COMMANDS.items()]
    lines += ["", "`jaxdiff COMMAND --help` lists the flags of a command, `jaxdiff --version` prints the version.", ""]
    lines += ["Examples:", *(f"  {command.examples[0]}" for command in COMMANDS.values() if command.examples)]
    return "\n".join(lines)


def _quickstart(given: Arguments) -> int:
    check_local("workdir", given.workdir)
    from jaxdiff import quickstart

    quickstart.run(Path(given.workdir), given.steps or None, given.samples or None)
    return 0


def _configs(given: Arguments) -> int:
    print(configs.listing())
    return 0


COMMANDS: dict[str, Command] = {
    "quickstart": Command(
        "Train a teacher on embedded digits, distil it and evaluate: minutes on any CPU.",
        _quickstart,
        (
            Flag("workdir", "quickstart", "folder for the runs and the report; run again to resume"),
            Flag("steps", 0, "training steps of the teacher, students in proportion; 0: as in the configs"),
            Flag("samples", 0, "samples per row of the table; 0: as in the config"),
        ),
        examples=("jaxdiff quickstart",),
    ),
    "train": train.COMMAND,
    "sample": sample.COMMAND,
    "evaluate": evaluate.COMMAND,
    "check": check.COMMAND,
    "compare": compare.COMMAND,
    "stats": stats.COMMAND,
    "ema": ema.COMMAND,
    **features.COMMANDS,
    "push": push.COMMAND,
    "plan": plan.COMMAND,
    "configs": Command("List the installed configs, what they train and the arguments they take.", _configs),
    "completion": complete.COMMAND,
}
