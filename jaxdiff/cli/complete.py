"""Completion of commands, flags, config names and config keys in bash, zsh and fish, without importing JAX."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from jaxdiff.cli import configs
from jaxdiff.cli.flags import COMMON_FLAGS, Arguments, Command, UsageError
from jaxdiff.errors import nearest

SCRIPTS = {
    "bash": """\
_jaxdiff() {
    mapfile -t COMPREPLY < <(jaxdiff __complete bash "${COMP_LINE:0:COMP_POINT}" 2>/dev/null)
    [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=.:] ]] && compopt -o nospace
}
complete -o default -F _jaxdiff jaxdiff
""",
    "zsh": """\
#compdef jaxdiff
_jaxdiff() {
    local -a found
    found=("${(@f)$(jaxdiff __complete zsh "${LBUFFER}" 2>/dev/null)}")
    if [[ -n "${found[1]}" ]]; then compadd -Q -S '' -- "${found[@]}"; else _files; fi
}
compdef _jaxdiff jaxdiff
""",
    "fish": """\
complete -c jaxdiff -f -n 'test -n "$(jaxdiff __complete fish (commandline -cp) 2>/dev/null)"' \\
    -a '(jaxdiff __complete fish (commandline -cp) 2>/dev/null)'
""",
}


def run(given: Arguments) -> int:
    shell = given.words[0] if given.words else ""
    if shell not in SCRIPTS:
        raise UsageError(f"completion needs one of {', '.join(SCRIPTS)}, got {shell!r}{nearest(shell, SCRIPTS)}")
    print(SCRIPTS[shell], end="")
    return 0


COMMAND = Command(
    "Print a script that completes commands, flags and config names in a shell.",
    run,
    words=tuple(SCRIPTS),
    examples=(
        "source <(jaxdiff completion bash)      in ~/.bashrc",
        "source <(jaxdiff completion zsh)       in ~/.zshrc, after compinit",
        "jaxdiff completion fish | source       in ~/.config/fish/config.fish",
    ),
)


def candidates(shell: str, line: str, commands: Mapping[str, Command]) -> list[str]:
    """Completions of the line, as the shell expects them: bash replaces only what follows = or :."""
    *before, word = line.split(" ")
    before = [part for part in before if part]
    start = max((i for i, part in enumerate(before) if Path(part).name == "jaxdiff"), default=0)  # after VAR=1 or cd x;
    found = [choice for choice in _choices(before[start + 1 :], word, commands) if choice.startswith(word)]
    if shell == "bash":
        kept = max(word.rfind("="), word.rfind(":")) + 1
        found = [choice[kept:] for choice in found]
    return found


def _choices(before: list[str], word: str, commands: Mapping[str, Command]) -> list[str]:
    """Every possible last word after the words before it, not yet filtered by what was typed."""
    name = " ".join(before[:2])
    if name not in commands:
        name = " ".join(before[:1])
    if name not in commands:
        following = [known.split(" ") for known in commands if known.split(" ")[: len(before)] == before]
        found = sorted({parts[len(before)] for parts in following})
        return found if before else [*found, "--help", "--version"]
    command = commands[name]
    if not word.startswith("-"):
        return list(command.words) or _values(command, before[-1].removeprefix("--"), word)
    flag, equals, typed = word[2:].partition("=")
    if equals:
        return [f"--{flag}={value}" for value in _values(command, flag, typed)]
    if word.startswith("--config."):
        return [f"--config.{key}=" for key in configs.key_comments()]
    flags = [f"--{known.name}" if isinstance(known.default, bool) else f"--{known.name}=" for known in command.flags]
    takes = {"file": ["--config=", "--config."], "either": ["--config=", "--config."], "run": ["--config."]}
    return [*flags, *takes.get(command.config, []), *(f"--{known.name}" for known in COMMON_FLAGS)]


def _values(command: Command, flag: str, typed: str) -> list[str]:
    """The known values of a flag."""
    if flag == "config" and command.config in ("file", "either"):
        name, colon, _ = typed.partition(":")
        if not colon:
            return [*configs.names(), *configs.recipes()]
        if name in configs.recipes():
            return []
        _, arguments = configs.summary(configs.find(name))
        return [f"{name}:{argument}" for argument in arguments]
    return [value for known in command.flags if known.name == flag for value in known.values]
