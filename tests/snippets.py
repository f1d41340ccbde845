"""The commands that pages show, and what HTML comments on the lines before a block say about running them.

    <!-- not run: REASON -->               no test runs the block
    <!-- not run, WORD: REASON -->         no test runs its lines that contain WORD
    <!-- run with: KEY=VALUE ... -->       a test adds these arguments, which make it short
    <!-- run with, WORD: KEY=VALUE ... --> the same for the lines that contain WORD
    <!-- run first: COMMAND -->            what the block needs, and its reader has already

A block is fenced, or indented by four spaces after an empty line.  A fenced one without a language is a diagram or
output, unless it begins with a command."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
UNTESTED = ("docs/adr", "docs/reference", "docs/benchmarks.md")  # what was, or is generated
PAGES = [ROOT / "README.md"] + [
    page for page in sorted((ROOT / "docs").rglob("*.md")) if not page.relative_to(ROOT).as_posix().startswith(UNTESTED)
]
COMMANDS = ("spmd-lm", "launch/local")
"""Commands that tests run."""
OTHER_COMMANDS = ("make", "sbatch", "pip", "python", "mpirun", "sky", "kubectl", "gcloud", "curl", "git")
"""Others: a comment must say why they are not run."""
COMMENT = re.compile(r"<!-- (not run|run with|run first)(?:, ([^:]+))?: (.+) -->")


class Comment(NamedTuple):
    """kind: `not run`, `run with` or `run first`; word: of the lines that it is about, '' for all."""

    kind: str
    word: str
    text: str


class Block(NamedTuple):
    """number: of its first line in the page; fence: what follows the ```, None for an indented block."""

    page: Path
    number: int
    fence: str | None
    lines: list[str]
    comments: list[Comment]

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.number}"

    def said(self, kind: str, line: str) -> list[str]:
        """Texts of the comments of this kind on a line."""
        return [comment.text for comment in self.comments if comment.kind == kind and comment.word in line]


def blocks(page: Path) -> Iterator[Block]:
    """Blocks of a page, in order."""
    lines, number, comments = page.read_text().splitlines(), 0, []
    while number < len(lines):
        line = lines[number]
        if found := COMMENT.fullmatch(line):
            comments.append(Comment(found[1], found[2] or "", found[3]))
        elif line.startswith("```"):
            end = lines.index("```", number + 1)
            yield Block(page, number + 1, line[3:], lines[number + 1 : end], comments)
            number, comments = end, []
        elif line.startswith("    ") and (not lines[number - 1] or lines[number - 1].startswith("<!--")):
            end = next((i for i in range(number, len(lines)) if not lines[i].startswith("    ")), len(lines))
            yield Block(page, number + 1, None, [text[4:] for text in lines[number:end]], comments)
            number, comments = end - 1, []
        else:
            assert not comments, f"{page}:{number + 1}: no block follows the comment"
        number += 1


def first_word(line: str) -> str:
    """The program that a line starts: without the prompt, variables set for it, and its directory in .venv."""
    words = [word for word in line.removeprefix("$ ").split() if not re.match(r"[A-Z_]+=", word)]
    return words[0].removeprefix(".venv/bin/") if words else ""


def is_snippet(block: Block) -> bool:
    """True for code that somebody would run, not only read."""
    if block.fence is None or block.fence in ("python", "bash", "sh", "shell", "console"):
        return True
    return first_word(block.lines[0]).startswith((*COMMANDS, *OTHER_COMMANDS, "launch/"))


def command_lines(block: Block) -> list[str]:
    """The commands of a block, each on one line, without the explanation to their right."""
    joined = "\n".join(block.lines).replace("\\\n", " ")
    return [strip_explanation(line) for line in joined.splitlines() if line]


def strip_explanation(line: str) -> str:
    """The line up to two or more spaces, unless these are between the parts of a command that was joined."""
    command, *rest = re.split(r" {2,}", line)
    for part in rest:
        if not re.match(r"[\w.]+=|--|[\"']", part):
            break
        command += f" {part}"
    return command


def arguments(line: str) -> list[str]:
    """Arguments that a shell would pass to `spmd-lm`."""
    return shlex.split(line)[1:]
