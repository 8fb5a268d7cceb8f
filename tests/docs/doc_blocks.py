"""Code blocks of Markdown pages, and the marks before them.

<!-- not run: REASON -->      the block is not executed
<!-- run with: name=3 -->     the block is executed with another value of a name that it assigns
"""

import ast
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<code>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!-- (?P<kind>not run|run with): (?P<text>.+?) -->\s*$")


@dataclass(frozen=True)
class Block:
    """One block: its page, the line of its first line of code, its language and its text."""

    page: Path
    line: int
    language: str
    code: str
    reason: str = ""  # why it is not run
    values: str = ""  # what it is run with

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """The README and every page of the site."""
    docs = ROOT / "docs"
    return [ROOT / "README.md", *sorted(path for path in docs.rglob("*.md") if "_build" not in path.parts)]


def blocks(page: Path, language: str) -> list[Block]:
    """The blocks of one language, in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        if match["language"] != language:
            continue
        before = text[: match.start()]
        mark = MARK.search(before)
        marks = {mark["kind"]: mark["text"]} if mark else {}
        line = before.count("\n") + 2
        found.append(Block(page, line, language, match["code"], marks.get("not run", ""), marks.get("run with", "")))
    return found


def runnable(block: Block) -> ast.Module:
    """The block as a program, with the values of its mark in place of those it assigns."""
    tree = ast.parse(block.code, filename=block.name)
    given = {node.targets[0].id: node.value for node in ast.parse(block.values).body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in given:
            node.value = given.pop(node.targets[0].id)
    assert not given, f"{block.name} assigns no {', '.join(given)}"
    ast.increment_lineno(tree, block.line - 1)
    return ast.fix_missing_locations(tree)


def commands(block: Block) -> list[list[str]]:
    """The commands of a bash block as words: comments dropped, lines continued, && split."""
    found = []
    for line in block.code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words:
            end = words.index("&&") if "&&" in words else len(words)
            found.append(words[:end])
            words = words[end + 1 :]
    return [words for words in found if words]
