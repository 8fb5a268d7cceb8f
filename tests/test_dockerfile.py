"""The images: their instructions, the stages, what is copied and installed. They are not built here."""

import fnmatch
import json
import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILE = ROOT / "experiments" / "launch" / "Dockerfile"
KNOWN = {"FROM", "ENV", "RUN", "WORKDIR", "COPY", "STOPSIGNAL", "USER", "ENTRYPOINT", "CMD"}
EXTRAS = {"cpu": set(), "cuda": {"cuda"}, "tpu": {"tpu"}}


def instructions():
    """[(name, arguments)], as Docker reads them: comments dropped, continued lines joined."""
    lines = [line for line in FILE.read_text().splitlines() if not line.lstrip().startswith("#")]
    text = re.sub(r"\\\n", " ", "\n".join(lines))
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]


def stages():
    """name -> (what it is made from, its instructions)."""
    found = {}
    for name, arguments in instructions():
        if name == "FROM":
            source, word, stage = arguments.split()
            assert word == "AS"
            found[stage] = (source, [])
        else:
            next(reversed(found.values()))[1].append((name, arguments))
    return found


def of_stage(name):
    """The instructions of a stage and of those it is made from."""
    source, own = stages()[name]
    return (of_stage(source) if source in stages() else []) + own


def extras():
    setup = (ROOT / "setup.py").read_text()
    return set(re.findall(r'^ {8}"(\w+)": \[', setup, re.M))


def test_only_known_instructions_and_a_base_that_setup_allows():
    assert {name for name, _ in instructions()} <= KNOWN
    assert instructions()[0][0] == "FROM" and list(stages()) == ["base", *EXTRAS]
    version = re.fullmatch(r"python:3\.(\d+)-slim-bookworm", stages()["base"][0])
    wanted = re.search(r'python_requires=">=3\.(\d+)"', (ROOT / "setup.py").read_text())
    assert int(version[1]) >= int(wanted[1])
    assert {stages()[name][0] for name in EXTRAS} == {"base"}


@pytest.mark.parametrize("stage", EXTRAS)
def test_a_stage_installs_its_extras_and_runs_the_command_as_a_user(stage):
    steps = of_stage(stage)
    last = dict(steps)
    assert json.loads(last["ENTRYPOINT"]) == ["jaxdiff"] and json.loads(last["CMD"]) == ["--help"]
    assert last["USER"] == "1000" and "--uid 1000" in dict(stages()["base"][1])["RUN"]
    assert last["STOPSIGNAL"] == "SIGTERM" and Path(last["WORKDIR"]).is_absolute()
    (command,) = [shlex.split(arguments) for name, arguments in stages()[stage][1] if name == "RUN"]
    assert command[:2] == ["pip", "install"]
    asked = set(re.fullmatch(r"\.\[(.*)\]", command[2])[1].split(","))
    assert asked <= extras() and asked & {"cuda", "cuda12", "tpu"} == EXTRAS[stage]
    installed = [name for name, _ in steps].index("COPY") < [arguments for _, arguments in steps].index(
        next(arguments for name, arguments in stages()[stage][1] if name == "RUN")
    )
    assert installed


def test_what_is_copied_is_there_and_not_ignored_and_is_all_that_setup_reads():
    copied = [shlex.split(arguments) for name, arguments in instructions() if name == "COPY"]
    sources = {source for *names, _ in copied for source in names}
    assert all((ROOT / source).exists() for source in sources)
    ignore = (FILE.parent / "Dockerfile.dockerignore").read_text().splitlines()
    assert ignore[0] == "*"  # all but
    kept = [line[1:] for line in ignore if line.startswith("!")]
    assert all(any(fnmatch.fnmatch(source, pattern) for pattern in kept) for source in sources)
    assert {"setup.py", "README.md", "configs", "jaxdiff"} <= sources
