"""Zero-shot tasks while a run trains have the figures that `spmd-lm eval --task` computes of its checkpoint."""

import json

import jax
import pytest

from spmd_lm.checkpoints import restored
from spmd_lm.config.load import load_run
from spmd_lm.config.schema import RunConfig
from spmd_lm.errors import ConfigError, DataError, Exit
from spmd_lm.evaluation.zero_shot import evaluate_tasks
from spmd_lm.step.program import Program
from spmd_lm.training import loop
from tests.chat_files import write_lines

CHOICES = [{"context": "a b", "choices": ["a", "b c"], "label": n % 2} for n in range(5)]


@pytest.fixture
def one_device(monkeypatch):
    monkeypatch.setattr(loop, "sample", lambda run: None)
    for module in (loop, restored):
        monkeypatch.setattr(module, "Program", lambda config: Program(config, jax.devices()[:1]))


def config(tmp_path, *tasks: str) -> RunConfig:
    (tmp_path / "a.txt").write_text("a b c d " * 200)
    return RunConfig.model_validate(
        {
            "run": {"dir": str(tmp_path / "run")},
            "model": {"layers": 1, "width": 16, "heads": 2, "context": 32, "vocab": 256},
            "data": {"source": "text", "path": str(tmp_path / "a.txt")},
            "parallel": {"data": 1},
            "precision": {"compute": "float32"},
            "optim": {"lr": 1e-2},
            "train": {"steps": 3, "batch": 4, "eval_every": 1, "log_every": 1, "eval_tasks": list(tasks)},
            "checkpoint": {"every": 1, "keep": 1, "keep_best": "eval_choice_accuracy"},
        }
    )


@pytest.mark.slow
def test_figures_are_those_of_the_checkpoint(tmp_path, one_device, capfd):
    tasks = [f"choice={write_lines(tmp_path / 'choice.jsonl', *CHOICES)}", "validation"]
    assert loop.train(config(tmp_path, *tasks)) == Exit.DONE
    assert "keep_best=eval_choice_accuracy: the checkpoint with the highest is kept" in capfd.readouterr().out
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    found = evaluate_tasks(load_run(tmp_path / "run"), tasks)["tasks"]
    expected = {f"eval_{task}_{name}": value for task in found for name, value in found[task]["metrics"].items()}
    assert {"eval_choice_accuracy", "eval_validation_perplexity"} <= expected.keys()
    assert {name: records[-1][name] for name in expected} == pytest.approx(expected, rel=1e-6)
    accuracies = [record["eval_choice_accuracy"] for record in records]
    best = accuracies.index(max(accuracies)) + 1
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()} == {str(best), "3"}


@pytest.mark.parametrize(
    ("task", "error", "problem"),
    [
        ("lambda=x", ConfigError, r"^train.eval_tasks: lambda=x: no task 'lambda'. Did you mean lambada\?"),
        ("choice=none.jsonl", DataError, r"^train.eval_tasks: choice=none.jsonl: no such file"),
        ("test", ConfigError, r"^train.eval_tasks: test: data.source=text has no test split.* Use validation\.$"),
    ],
)
def test_a_wrong_task_is_refused_before_the_first_step(tmp_path, one_device, task, error, problem):
    with pytest.raises(error, match=problem):
        loop.train(config(tmp_path, task))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
