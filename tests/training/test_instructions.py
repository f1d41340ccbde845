"""A run on conversations: resumed it is the same run, it keeps its chat template, and it answers."""

import json
from pathlib import Path

import jax
import pytest

from spmd_lm.checkpoints import restored
from spmd_lm.cli import main
from spmd_lm.config.load import dump, load, load_run
from spmd_lm.config.schema import RunConfig
from spmd_lm.errors import ConfigError, DataError, Exit
from spmd_lm.step.program import Program
from spmd_lm.training import loop
from spmd_lm.training.loop import train
from tests.chat_files import CHATML, VOCAB, turns, write_lines, write_tokenizer

LINES = [turns("Why?", "It is."), turns("What?", "Yes.", "Why?", "It is."), turns("Who?", "2 of us.")]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Training and validation lines, a tokenizer without a template, and a template; for runs on one device."""
    monkeypatch.setattr(loop, "sample", lambda run: None)
    for module in (loop, restored):
        monkeypatch.setattr(module, "Program", lambda config, **how: Program(config, jax.devices()[:1], **how))
    write_lines(tmp_path / "a.jsonl", *LINES)
    write_tokenizer(tmp_path / "t")
    (tmp_path / "chatml.jinja").write_text(CHATML)
    return tmp_path


def make_config(files: Path, directory: str, **train) -> RunConfig:
    path = str(files / "a.jsonl")
    tree = {
        "run": {"dir": str(files / directory)},
        "model": {"layers": 1, "width": 32, "heads": 2, "context": 96, "vocab": VOCAB},
        "data": {"source": "instructions", "path": path, "validation_path": path, "tokenizer": str(files / "t")},
        "parallel": {"data": 1},
        "precision": {"compute": "float32"},
        "optim": {"lr": 1e-2, "decay": "constant"},
        "train": {"steps": 100, "batch": 2, "eval_every": 100, "log_every": 1} | train,
        "checkpoint": {"every": 30},
    }
    tree["data"]["chat_template"] = str(files / "chatml.jinja")
    return RunConfig.model_validate(tree)


@pytest.mark.slow
def test_a_run_on_conversations(files, capfd):
    directory = files / "run"
    assert train(make_config(files, "run")) == Exit.DONE
    assert "a.jsonl: 3 training conversations, 3 validation conversations, " in capfd.readouterr().out
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [*range(1, 101)] and records[-1]["eval_accuracy"] == 1

    (files / "chatml.jinja").rename(files / "elsewhere.jinja")
    copy, moved = directory / "tokenizer" / "chat_template.jinja", load_run(directory)
    assert copy.read_text() == CHATML and moved.data.chat_template == str(copy)
    said = [option for turn in ("What?", "Why?") for option in ("--prompt", turn)]
    assert main(["generate", str(directory), "--chat", *said, "--greedy", "--tokens", "20"]) == Exit.DONE
    assert capfd.readouterr().out == "Yes.\n\nIt is.\n"

    assert main(["export", str(directory), str(files / "exported")]) == Exit.DONE
    assert (files / "exported" / "chat_template.jinja").read_text() == CHATML
    capfd.readouterr()

    write_lines(files / "a.jsonl", *LINES[::-1])
    with pytest.raises(DataError, match="its data is not what it was trained on so far"):
        train(load(directory / "config.yaml", ["train.steps=101", f"data.chat_template={copy}"]))
    for arguments, code, problem in (
        (["eval", "--task", "validation"], Exit.CONFIG, "data.source=instructions has rows, and no text"),
        (["generate", "--chat"], Exit.CONFIG, "--chat: the user says nothing. Add --prompt TEXT"),
    ):
        assert main([arguments[0], str(directory), *arguments[1:]]) == code
        assert problem in capfd.readouterr().err
    copy.write_text("{{ raise_exception('no') }}")
    assert main(["generate", str(directory), "--chat", "--prompt", "a"]) == Exit.DATA
    assert "chat_template.jinja: it says: no. Correct" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ("train.eval_every=5", "train.eval_every=5 with data.source=instructions and no data.validation_path. Use"),
        ("objective.kind=masked_lm model.kind=bert", "whose answers are predicted token by token. Use objective.kind="),
        ("data.tokenizer=bpe", "data.tokenizer=bpe with data.source=instructions, which has no documents"),
        ("data.path=[]", "data.path=[] names no file"),
        ("data.validation_fraction=0.1", "'validation_fraction' belongs to data.source=python-stdlib"),
        (
            "model.attention=cudnn precision.compute=bfloat16",
            "data.pack=true: cuDNN has no causal mask",
        ),
    ],
)
def test_configurations_that_do_not_suit(tmp_path, overrides, problem):
    path = tmp_path / "config.yaml"
    path.write_text(dump(make_config(tmp_path, "run", eval_every=0)))
    given = ["data.validation_path=null", "data.pack=true", *overrides.split()]
    with pytest.raises(ConfigError) as error:
        load(path, given)
    assert problem in str(error.value)
