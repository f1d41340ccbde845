"""Runs with user blocks, objectives, optimizers and data: what they keep, and when they resume."""

import shutil
from pathlib import Path

import pytest

import spmd_lm
from spmd_lm.cli import main
from spmd_lm.config.load import load, load_run
from spmd_lm.config.own_modules import ModuleRef, modules_of
from spmd_lm.errors import ConfigError, DataError, Exit
from spmd_lm.sweeps.cells import Cell
from tests.own import example

CONFIG = """
run: {dir: DIR, simulate_devices: 8, compilation_cache: none}
model: {layers: 2, width: 16, heads: 4, context: 64, vocab: 256, dropout: 0.0, attention_dropout: 0.0,
        module: parts/gptj.py:GPTJBlock}
objective: {kind: causal_lm, module: parts/late.py:LateTokens}
data: {source: custom, module: parts/counting.py:sample, validation_samples: 16}
optim: {kind: custom, module: parts/signed.py:signed_momentum, lr: 1e-3}
precision: {compute: float32}
train: {steps: 2, batch: 8, log_every: 1, eval_batches: 1}
checkpoint: {every: 2}
"""
FILES = {"gptj": "GPTJBlock", "late": "LateTokens", "counting": "sample", "signed": "signed_momentum"}


@pytest.fixture
def mine(tmp_path, monkeypatch) -> Path:
    """A configuration and its modules in a directory of their own, seen from another one."""
    (tmp_path / "mine/parts").mkdir(parents=True)
    for stem, name in FILES.items():
        (tmp_path / f"mine/parts/{stem}.py").write_text(example(name))
    config = tmp_path / "mine/config.yaml"
    config.write_text(CONFIG.replace("DIR", str(tmp_path / "run")))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return config


def start(mine: Path, *overrides: str) -> int:
    return main(["train", str(mine), *overrides])


@pytest.mark.slow
def test_a_run_keeps_its_modules_and_resumes_with_the_same_ones_alone(mine, tmp_path, capsys):
    run, block = tmp_path / "run", mine.parent / "parts/gptj.py"
    assert start(mine, "parallel.model=2", "parallel.zero=3", "parallel.sequence=true") == 0
    assert {path.read_text() for path in (run / "modules").iterdir()} == {*map(example, FILES.values())}

    old, changed = modules_of(load(mine))["model"], "# changed\n" + block.read_text()
    block.write_text(changed)
    new = modules_of(load(mine))["model"]
    assert start(mine, "train.steps=6") == Exit.CONFIG
    told = capsys.readouterr().err
    assert all(text in told for text in (str(block), old.hash, new.hash, str(run / "modules"))), told
    assert not (run / "checkpoints/6").exists()

    # the copies are enough, wherever the run is
    shutil.rmtree(mine.parent)
    shutil.move(run, tmp_path / "away")
    copy = tmp_path / f"away/modules/{old.hash}.py"
    assert modules_of(load_run(tmp_path / "away"))["model"] == old._replace(path=str(copy))
    copy.write_text(changed)
    assert main(["eval", str(tmp_path / "away")]) == Exit.CONFIG
    assert f"{copy} was changed" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_resumes_under_another_layout_and_is_used_by_its_copies(mine, tmp_path, capsys):
    """The files have moved by then, one under another name; in the end they are gone."""
    assert start(mine, "parallel.model=2", "parallel.zero=3") == 0
    shutil.move(mine.parent / "parts", tmp_path / "moved")
    shutil.move(tmp_path / "moved/gptj.py", tmp_path / "moved/block.py")
    mine.write_text(mine.read_text().replace("parts/", "../moved/").replace("gptj.py", "block.py"))
    pipeline = "parallel.pipe=2", "parallel.model=2", "parallel.microbatches=2"
    assert start(mine, *pipeline, "train.steps=4") == 0 and (tmp_path / "run/checkpoints/4").is_dir()
    assert len([*(tmp_path / "run/modules").iterdir()]) == len(FILES)
    shutil.rmtree(tmp_path / "moved")
    assert main(["eval", str(tmp_path / "run"), "--json", "-"]) == 0
    assert '"eval_loss"' in capsys.readouterr().out
    assert main(["generate", str(tmp_path / "run"), "--prompt", "abc", "--tokens", "3"]) == 0


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (None, "cannot be read: No such file"),
        ("class GPTJBlock(:\n    pass\n", "line 1 is not Python"),
        ("class Block:\n    pass\n", "defines no GPTJBlock. It defines Block."),
        ("import no_such_package\n\n\nclass GPTJBlock:\n    pass\n", "line 1: cannot be imported: ModuleNotFoundError"),
        ("x = 1\ny = x / 0\n\n\nclass GPTJBlock:\n    pass\n", "line 2: cannot be imported: ZeroDivisionError"),
        ("class GPTJBlock:\n    pass\n", "has to be a subclass of flax.nnx.Module"),
    ],
)
def test_a_file_that_cannot_be_used_is_told_before_anything_is_written(mine, tmp_path, capsys, source, told):
    block = mine.parent / "parts/gptj.py"
    block.unlink() if source is None else block.write_text(source)
    assert start(mine) == Exit.CONFIG
    error = capsys.readouterr().err
    assert told in error and str(block) in error
    assert not (tmp_path / "run/config.yaml").exists() and not (tmp_path / "run/modules").exists()


def test_a_path_is_relative_to_the_file_that_names_it(mine, monkeypatch):
    """A base's path is relative to the base, the command line's to the working directory."""
    (mine.parent / "deeper").mkdir()
    derived = mine.parent / "deeper/derived.yaml"
    derived.write_text("base: ../config.yaml\ntrain: {steps: 3}\n")
    assert modules_of(load(derived)) == modules_of(load(mine))
    Path("block.py").write_text(example("GPTJBlock"))
    ref = modules_of(load(derived, ["model.module=block.py:GPTJBlock"]))["model"]
    assert ref == ModuleRef(str(Path("block.py").absolute()), "GPTJBlock", modules_of(load(mine))["model"].hash)


@pytest.mark.parametrize("text", ["block.py", "block:Name", "block.py:not a name", ".py:Name@12"])
def test_what_names_no_module_is_refused(mine, text):
    with pytest.raises(ConfigError, match=r"expected a Python file and a name in it"):
        load(mine, [f"model.module={text}"])


def test_an_objective_without_evaluation_is_refused_where_a_run_evaluates(mine, tmp_path, capsys):
    (mine.parent / "parts/late.py").write_text(
        "from spmd_lm.models.heads import Head\n\n\nclass LateTokens(Head):\n"
        "    def __init__(self, init, policy):\n        super().__init__(init)\n"
    )
    assert start(mine, "train.eval_every=2") == Exit.CONFIG
    assert "train.eval_every=2: LateTokens has no eval_sums" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        ("np.arange(64)", "has the shape (64,)"),
        ("np.full(65, 256)", "are from 256 to 256. Return some from 0 to 255"),
        ("{'tokens': np.zeros(64, int)}", "has no targets, which the objective reads"),
        ("{'tokens': np.zeros(64, int), 'targets': np.zeros(64, int), 'masks': 1}", "has masks, which no row has"),
        ("np.stack([n] * (n - 16))", "line 5: ValueError"),
        ("np.ones(65)", "are float64. Return whole numbers"),
    ],
)
def test_samples_that_are_no_rows_are_told_with_their_number(mine, returned, told):
    source = f"import numpy as np\n\n\ndef sample(n):\n    return {returned}\n"
    (mine.parent / "parts/counting.py").write_text(source)
    with pytest.raises(DataError, match=r"counting\.py:sample\(16\)") as error:
        spmd_lm.read_batch(load(mine))
    assert told in str(error.value)


def test_training_goes_through_the_samples_after_those_held_out(mine):
    batch = spmd_lm.read_batch(load(mine), step=2)
    namespace: dict = {}
    exec(example("sample"), namespace)
    rows = [namespace["sample"](16 + 8 + row) for row in range(8)]
    assert (batch.tokens == [row[:-1] for row in rows]).all() and (batch.targets == [row[1:] for row in rows]).all()


def test_a_cell_of_a_sweep_has_copies_too(mine, tmp_path):
    config = load(mine, [f"run.dir={tmp_path / 'cell'}"])
    Cell("a", {}, config).prepare()
    saved = load_run(tmp_path / "cell")
    assert {name: ref[1:] for name, ref in modules_of(saved).items()} == {
        name: ref[1:] for name, ref in modules_of(config).items()
    }
    assert all(Path(ref.path).parent == tmp_path / "cell/modules" for ref in modules_of(saved).values())
