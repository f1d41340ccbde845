"""End to end: a model trained on text is fine-tuned on labels with several seeds, evaluated, and exported."""

import json
import statistics

import numpy as np
import pytest

from spmd_lm.cli import main
from spmd_lm.config.load import load_run

pytestmark = pytest.mark.slow

PRETRAINING = """
run: {name: first, dir: DIR/first}
model: {kind: bert, layers: 2, width: 64, heads: 4, context: 32, vocab: 260, token_types: 2, norm: post}
objective: {kind: masked_lm}
data: {source: text, path: DIR/text.txt}
parallel: {data: 4, model: 2}
precision: {compute: float32}
optim: {lr: 1e-3}
train: {steps: 3, batch: 16}
checkpoint: {every: 3}
"""
TUNING = """
run: {name: second, dir: DIR/second, init_from: DIR/first}
model: {dropout: 0.0, attention_dropout: 0.0, context: 24}
objective: {kind: classification, classes: 3}
data: {source: task, task: jsonl, path: DIR/train.jsonl, validation_path: DIR/dev.jsonl}
parallel: {data: 4, model: 2, sequence: true, zero: 3}
precision: {compute: float32}
optim: {lr: 3e-3, warmup: 10, freeze: embedding.positions}
train: {steps: 120, batch: 32, log_every: 40, eval_every: 60, seed: 5}
checkpoint: {every: 60}
"""


@pytest.fixture
def directory(tmp_path):
    """A text, and examples whose first letter is their class."""
    r = np.random.default_rng(0)

    def words() -> str:
        return "".join(r.choice([*"defg "], r.integers(3, 20)))

    (tmp_path / "text.txt").write_text("\n".join(words() for _ in range(400)))
    for side, count in (("train", 600), ("dev", 101)):
        lines = [{"text": "abc"[label] + words(), "label": int(label)} for label in r.integers(0, 3, count)]
        (tmp_path / f"{side}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, text in (("first", PRETRAINING), ("second", TUNING)):
        (tmp_path / f"{name}.yaml").write_text(text.replace("DIR", str(tmp_path)))
    return tmp_path


def test_a_model_is_fine_tuned_with_two_seeds_evaluated_under_another_layout_and_exported(directory, capsys):
    assert main(["train", str(directory / "first.yaml")]) == 0
    line = ["train", str(directory / "second.yaml"), "--seeds", "2", "--json", str(directory / "result.json")]
    assert main(line) == 0
    result = json.loads((directory / "result.json").read_text())
    out = capsys.readouterr().out
    assert "seed 5" in out and "seed 6" in out and "eval_matthews" in out

    for name, by_seed in result["seeds"].items():
        assert by_seed.keys() == {"5", "6"}
        assert result["median"][name] == statistics.median(by_seed.values())
    assert result["median"]["eval_accuracy"] > 0.9 > 0.5
    assert result["seeds"]["eval_loss"]["5"] != result["seeds"]["eval_loss"]["6"]

    # Evaluated again, with other batches on other devices.
    other = ["parallel.pipe=2", "parallel.data=2", "parallel.zero=0", "train.batch=8", "--json", "-"]
    assert main(["eval", str(directory / "second" / "cells" / "seed-6"), *other]) == 0
    evaluated = json.loads(capsys.readouterr().out)
    assert evaluated["examples"] == 101
    assert evaluated["eval_loss"] == pytest.approx(result["seeds"]["eval_loss"]["6"], rel=1e-4)
    assert evaluated["eval_accuracy"] == result["seeds"]["eval_accuracy"]["6"]

    # A finished run needs its pretrained run no longer.
    (directory / "first").rename(directory / "gone")
    assert load_run(directory / "second" / "cells" / "seed-5").model.context == 24
    assert main(["export", str(directory / "second" / "cells" / "seed-5"), str(directory / "exported")]) == 0
    exported = json.loads((directory / "exported" / "config.json").read_text())
    assert exported["architectures"] == ["BertForSequenceClassification"] and len(exported["id2label"]) == 3
