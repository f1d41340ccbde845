"""Files of every zero-shot task, small ones."""

import json
from pathlib import Path

from spmd_lm.config.schema import RunConfig
from spmd_lm.evaluation.scoring import Scorer
from spmd_lm.evaluation.zero_shot import make_tasks

TEXT = "It was a bright cold day in April, and the clocks were striking thirteen."
PASSAGES = ["a cold day in April", "  the clocks were\nstriking thirteen ", "so it was", "he said: no; she said: yes"]
QUESTIONS = [
    {"context": "It was", "choices": ["cold", "a bright day", "so"], "label": 1},
    {"context": "The clocks were ", "choices": ["striking", "still"], "label": 0},
    {"context": "", "choices": ["April", "May", "June", "July"], "label": 3},
]
ARTICLE = {
    "article": "It was a cold day.\nThe clocks struck.",
    "questions": ["In April it was   _  .", "What struck?", "_ is early."],
    "options": [["cold", "hot", "a day", "no"], ["clocks", "days", "he", "she"], ["One", "Ten", "It", "April"]],
    "answers": ["A", "B", "D"],
}


def write_lines(path: Path, values: list) -> Path:
    path.write_text("".join(f"{json.dumps(value)}\n" for value in values))
    return path


def write_items(root: Path) -> list[str]:
    """Writes a file for each task; returns the values of --task."""
    (root / "text.txt").write_text(TEXT)
    (root / "wiki.txt").write_text(" \n = Title = \n \n It 's a cold day , a one @-@ off ( so it was ) . \n")
    write_lines(root / "lambada.jsonl", [{"text": passage} for passage in PASSAGES])
    write_lines(root / "choice.jsonl", QUESTIONS)
    write_lines(root / "race.jsonl", [ARTICLE])
    files = {"text": "text.txt", "wikitext": "wiki.txt"} | {n: f"{n}.jsonl" for n in ("lambada", "choice", "race")}
    return [f"{name}={root / file}" for name, file in files.items()]


def figures(config: RunConfig, scorer: Scorer, tasks: list[str], stride: int | None = None) -> dict[str, dict]:
    return {task.name: task.figures(scorer(task.windows)).to_dict() for task in make_tasks(config, tasks, stride)}
