"""The commands that README.md and docs/ show are run, or a comment before them says why not (tests/snippets.py)."""

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spmd_lm.cli import VERBS, parse
from tests import snippets
from tests.snippets import PAGES, ROOT, Block, arguments, blocks, command_lines, first_word, is_snippet

QUICK = ("plan", "config")
"""Verbs that compute nothing: the only ones that are run outside the slow tests."""
DRIVER = """
import sys
from spmd_lm.cli import main
from tests.snippets import arguments
for line in sys.argv[1:]:
    print("$", line, file=sys.stderr, flush=True)
    if code := main(arguments(line)):
        sys.exit(f"exit code {code}")
"""
TESTED_ELSEWHERE = {"README.md": "python", "docs/reports.md": "python", "docs/faq.md": "$ "}
"""Beginnings of blocks that tests/test_docs.py and tests/test_faq.py run, by page."""


def problems(block: Block) -> list[str]:
    """Errors in a snippet's comments, and commands that nothing is known about."""
    if not is_snippet(block):
        return []
    known = TESTED_ELSEWHERE.get(block.page.relative_to(ROOT).as_posix())
    if known and (block.fence == known or block.lines[0].startswith(known)):
        return []
    lines = command_lines(block) if block.fence != "python" else ["\n".join(block.lines)]
    unknown = [line for line in lines if not (block.fence != "python" and first_word(line) in snippets.COMMANDS)]
    found = [f"{block.where}: no test runs `{line}`" for line in unknown if not block.said("not run", line)]
    idle = [comment for comment in block.comments if not any(comment.word in line for line in lines)]
    return found + [f"{block.where}: no line has '{comment.word}'" for comment in idle]


def commands(page: Path) -> list[str]:
    """Lines of a page that are run, in order, with the arguments that make them short."""
    found = []
    for block in filter(is_snippet, blocks(page)):
        found += [comment.text for comment in block.comments if comment.kind == "run first"]
        for line in command_lines(block):
            if first_word(line) in snippets.COMMANDS and not line.startswith("$") and not block.said("not run", line):
                found.append(" ".join([line, *block.said("run with", line)]))
    return found


def directory_of_a_reader(path: Path) -> Path:
    """A directory with the repository's files that the pages' commands read."""
    for name, target in {"configs": "configs", "launch": "launch", "docs": "docs"}.items():
        (path / name).symlink_to(ROOT / target)
    return path


def run(lines: list[str], directory: Path) -> None:
    """Runs lines in one process, but one each for those that compile for absent hardware or start processes: jax cannot
    change its devices."""
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    environment |= {"PYTHONPATH": str(ROOT)}

    def kind(line: str) -> str:
        return line if first_word(line) == "launch/local" or "--topology" in line else ""

    for own, together in itertools.groupby(lines, kind):
        command = [sys.executable, "-c", DRIVER, *together]
        if first_word(own) == "launch/local":
            command = [sys.executable, "launch/local", *arguments(own)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(command, cwd=directory, env=environment, check=False, **pipes)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_is_run_or_says_why_not(page):
    assert not [problem for block in blocks(page) for problem in problems(block)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_has_verbs_and_options_that_exist(page):
    """Commands that are not run count too; a synopsis, with its [...], is none."""
    lines = [line for block in filter(is_snippet, blocks(page)) for line in command_lines(block)]
    for line in lines:
        if first_word(line) == "spmd-lm" and "[" not in line.replace("blocks.[", "") and not line.startswith("$"):
            assert parse(arguments(line))[0] in VERBS


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("\n    frobnicate configs\n", "no test runs `frobnicate configs`"),
        ("\n    make train   # minutes\n", "no test runs `make train`"),
        ("```python\nprint(1)\n```\n", "no test runs `print(1)`"),
        ("```bash\nls\n```\n", "no test runs `ls`"),
        ("<!-- not run, sbatch: a cluster -->\n    spmd-lm plan a.yaml\n", "no line has 'sbatch'"),
        ("<!-- not run: minutes -->\n    make train\n", ""),
        ("```\n0|1\n```\n", ""),
        ("- a list\n    that goes on\n", ""),
    ],
)
def test_a_command_that_nothing_is_known_about_is_found(text, complaint, tmp_path, monkeypatch):
    monkeypatch.setattr(snippets, "ROOT", tmp_path)
    monkeypatch.setattr("tests.test_snippets.ROOT", tmp_path)
    (tmp_path / "page.md").write_text(text)
    found = [problem for block in blocks(tmp_path / "page.md") for problem in problems(block)]
    assert [problem.split(": ", 1)[1] for problem in found] == [complaint] * bool(complaint)


def test_commands_are_read_without_what_explains_them(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- run first: spmd-lm train b.yaml -->\n<!-- run with, train: train.steps=2 -->\n"
        "    spmd-lm train a.yaml --devices 8 \\\n        parallel.model=2      what it does (*)\n"
        "    spmd-lm plan a.yaml      # draws\n"
    )
    train = "spmd-lm train a.yaml --devices 8 parallel.model=2 train.steps=2"
    assert commands(page) == ["spmd-lm train b.yaml", train, "spmd-lm plan a.yaml"]


@pytest.mark.slow
def test_commands_that_compute_nothing_run(tmp_path):
    """Pages' commands run unchanged, in one process."""
    lines = [line for page in PAGES for line in commands(page) if first_word(line) == "spmd-lm"]
    quick = [line for line in dict.fromkeys(lines) if arguments(line)[0] in QUICK]
    assert len(quick) >= 3
    run(quick, directory_of_a_reader(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("page", [*filter(commands, PAGES)], ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_run_in_their_order(page, tmp_path):
    lines = commands(page)
    if any("--topology v5p" in line or "--topology h100" in line for line in lines):
        pytest.importorskip("libtpu")
        pytest.importorskip("jax_plugins.xla_cuda13")
    run(lines, directory_of_a_reader(tmp_path))
    shutil.rmtree(tmp_path / "runs", ignore_errors=True)
