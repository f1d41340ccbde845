"""The commands of docs/faq.md fail as it says: with the exit code of their section, and the same words."""

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from spmd_lm.cli import main
from tests.snippets import ROOT, arguments

PAGE = (ROOT / "docs/faq.md").read_text()


class Example(NamedTuple):
    """code: the exit code that the section's heading gives; error: what the last command prints, one space for each
    break of a line, and ... for what differs between machines."""

    code: int
    commands: list[str]
    error: str


def examples() -> list[Example]:
    found, code = [], 0
    for heading, block in re.findall(r"^## (.*)\n|((?:^    .*\n)+)", PAGE, re.MULTILINE):
        if heading:
            code = int((re.search(r"exit code (\d+)", heading) or [0, 0])[1])
        else:
            lines = [line.strip() for line in block.splitlines()]
            commands = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
            found.append(Example(code, commands, " ".join(line for line in lines if not line.startswith("$ "))))
    return found


def steps(example: Example) -> list:
    """Marks: examples that train are slow."""
    computes = len([line for line in example.commands if " train " in line]) > 1 or example.code == 6
    return [pytest.mark.slow] if computes else []


def test_every_kind_of_error_has_an_example():
    assert {example.code for example in examples()} == {2, 4, 5, 6} and len(examples()) >= 14


@pytest.mark.parametrize(
    "example", [pytest.param(each, id=each.commands[-1], marks=steps(each)) for each in examples()]
)
def test_an_error_is_as_the_page_says(example, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("configs").symlink_to(ROOT / "configs")
    *first, last = example.commands
    for command in first:
        if command.startswith("spmd-lm "):
            assert main(arguments(command)) == 0
        else:
            subprocess.run(command, shell=True, check=True)
    capsys.readouterr()
    assert main(arguments(last)) == example.code
    told = " ".join(capsys.readouterr().err.split())
    told = told[told.index("error: ") :]  # what was logged before it
    expected = re.escape(example.error).replace(r"\.\.\.", ".*")
    assert re.fullmatch(expected, told), told
