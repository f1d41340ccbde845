"""Whatever a file holds that a verb reads: a known exit code and a sentence, within 10 s and 2 GiB, and nothing is
written elsewhere or run.

FUZZ_CASES=20000 tries more cases than 2,000, FUZZ_SEED=7 others."""

import functools
import json
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import hypothesis
import matplotlib
import pytest
from hypothesis import strategies as st

from spmd_lm.checkpoints.record import RECORD_FILE, file_sizes, read_record
from spmd_lm.errors import Exit
from tests.conftest import CACHE
from tests.data.tokenizers.test_subwords import byte_level, wordpiece
from tests.huggingface.small_models import HF_CONFIG, make_directory, make_tensors
from tests.reliability import contained
from tests.reliability.contained import run, watching
from tests.reliability.mutations import Choose, change, copy, remove
from tests.training.test_loop import PLAN_REPORT, FakeProgram

ROOT = Path(__file__).parents[2]
CACHES = CACHE, Path(matplotlib.get_cachedir()), Path(matplotlib.get_configdir())
WIDE = HF_CONFIG | {"vocab_size": 264}  # for the ids of the tokenizer beside it
CONFIGS = [path for path in sorted((ROOT / "configs").rglob("*.yaml")) if path.parent.name != "sweeps"]
TEXT = "a few words, and one more: byte by byte. " * 200
MODEL = "layers: 1, width: 16, heads: 2, context: 16, vocab: 264"
LLAMA = "norm_type: rms, positions: rotary, activation: swiglu, use_bias: false"  # few arrays
GPT = f"""
run: {{dir: RUN, simulate_devices: 8}}
model: {{{MODEL}, {LLAMA}}}
data: {{source: text, path: HERE/text.md, tokenizer: HERE/bpe}}
precision: {{compute: float32}}
optim: {{kind: lion, lr: 1e-3}}
train: {{steps: 2, batch: 8, log_every: 1}}
checkpoint: {{every: 1}}
"""
BERT = (
    GPT.replace(f", {LLAMA}", "")
    .replace("model: {", "objective: {kind: masked_lm}\nmodel: {kind: bert, ")
    .replace("bpe", "wordpiece")
)


class StopsAtInit(FakeProgram):
    """A program that stops once everything is read."""

    def __init__(self, config):
        self.config = config

    def init(self):
        raise SystemExit(0)

    abstract_canonical = init


def stop(*_: object, **__: object) -> None:
    raise SystemExit(0)


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    """A directory with one of each: configs, a run, tokenizers, a model to import."""
    here = tmp_path_factory.mktemp("given")
    (here / "elsewhere").mkdir()
    (here / "text.md").write_text(TEXT)
    for name, make in {"bpe": byte_level, "wordpiece": wordpiece}.items():
        (here / name).mkdir()
        make(here / name)
    (here / "bpe/tokenizer_config.json").write_text('{"add_prefix_space": true}')
    (here / "wordpiece/tokenizer_config.json").write_text('{"do_lower_case": true, "strip_accents": null}')
    from spmd_lm.data.tokenizers.vocabulary import load_vocabulary

    (here / "library").mkdir()
    load_vocabulary(str(here / "bpe")).save(str(here / "library/tokenizer.json"))
    for name, text in {"gpt": GPT, "bert": BERT}.items():
        (here / f"{name}.yaml").write_text(text.replace("HERE", str(here)).replace("RUN", str(here / "run")))
    copy(ROOT / "configs", here / "configs")
    for directory in {path.parent for path in (here / "configs").rglob("*.yaml")}:
        (directory / "loop.yaml").write_text("base: mutated.yaml")
        (directory / "link").symlink_to("link")
        os.mkfifo(directory / "pipe")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here / "elsewhere")
        with watching(here, *CACHES):
            assert run("train", here / "gpt.yaml", limited=False)[0] == Exit.DONE
    make_directory(here / "model", make_tensors(WIDE), WIDE)
    copy(here / "bpe", here / "model-tokenizer")
    return here


@pytest.fixture
def stops(here, monkeypatch) -> Path:
    """`here`, with verbs that read and check, and compile nothing."""
    monkeypatch.setattr("spmd_lm.training.loop.Program", StopsAtInit)
    monkeypatch.setattr("spmd_lm.training.loop.plan_report", PLAN_REPORT)
    monkeypatch.setattr("spmd_lm.evaluation.evaluate.validation_metrics", stop)
    monkeypatch.setattr("spmd_lm.generation.generate.Generator", stop)
    monkeypatch.setattr("spmd_lm.huggingface.transfer.read_params", stop)
    monkeypatch.chdir(here / "elsewhere")
    return here


def try_config(choose: Choose, here: Path) -> int:
    source = choose(st.sampled_from(CONFIGS))
    path = here / "configs" / source.relative_to(ROOT / "configs").with_name("mutated.yaml")
    remove(path)
    path.write_bytes(source.read_bytes())
    change(choose, path)
    code = run("config", path)[0]
    assert code in (Exit.DONE, Exit.CONFIG)
    return run("train" if code else "plan", path)[0]  # what config refuses, train refuses


RUN_FILES = ["config.yaml", "status.json", "metrics.jsonl", ".lock", "tracker_id", "tokenizer/vocab.json"]


def try_run(choose: Choose, here: Path) -> int:
    original, mutated, exported = here / "run", copy(here / "run", here / "mutated"), here / "exported"
    remove(exported)
    for name in (".lock", "tracker_id"):
        (mutated / name).write_text(f"process 123 on {socket.gethostname()} since 2026-01-01\n")
    checkpoint = mutated / "checkpoints/2"
    saved = [path for path in sorted(checkpoint.rglob("*")) if path.is_file()]
    record = checkpoint / RECORD_FILE
    path = choose(st.sampled_from([mutated / name for name in RUN_FILES] + [record] * 3 + saved))
    change(choose, path)
    if path in saved and path != record and choose(st.booleans()):  # orbax itself must notice
        read_record(checkpoint).model_copy(update={"files": file_sizes(checkpoint)}).write(checkpoint)
    lines: list[list[object]] = [
        ["ckpt", "ls", mutated],
        ["ckpt", "verify", mutated, "--step", "2"],
        ["ckpt", "diff", f"{mutated}@2", f"{original}@2", "--json", "-"],
        ["report", mutated, *([original] if choose(st.booleans()) else [])],  # takes 1 s
        ["eval", mutated],
        ["eval", mutated, "--fallback"],
        ["config", mutated],
        ["plan", mutated],
        ["generate", mutated, "--prompt", "a few", "--tokens", "2"],
        ["export", mutated, exported],
        ["train", mutated, "train.steps=4"],
    ]
    return run(*choose(st.sampled_from(lines)))[0]


def try_tokenizer(choose: Choose, here: Path) -> int:
    name = choose(st.sampled_from(["bpe", "wordpiece", "library"]))
    mutated = copy(here / name, here / "mutated-tokenizer")
    change(choose, choose(st.sampled_from(sorted(mutated.iterdir()))))
    remove(here / "other-run")
    config = here / ("bert.yaml" if name == "wordpiece" else "gpt.yaml")
    line = ["train", config, f"data.tokenizer={mutated}", f"run.dir={here / 'other-run'}"]
    return run(*line, *(["train.eval_every=1"] if choose(st.booleans()) else []))[0]


def try_import(choose: Choose, here: Path) -> int:
    mutated = copy(here / "model", here / "mutated-model")
    for file in sorted((here / "model-tokenizer").iterdir()):
        (mutated / file.name).write_bytes(file.read_bytes())
    index = {"weight_map": dict.fromkeys(make_tensors(WIDE), "model.safetensors"), "metadata": {"total_size": 1}}
    (mutated / "model.safetensors.index.json").write_text(json.dumps(index))
    names = ["config.json"] * 3 + ["model.safetensors.index.json"] * 2 + ["vocab.json", "merges.txt"]
    change(choose, mutated / choose(st.sampled_from(names)))
    remove(here / "imported")
    return run("import", mutated, here / "imported", "--devices", "8", "train.batch=8")[0]


TRIED: dict[str, tuple[Callable[[Choose, Path], int], int]] = {  # and how often of 2,000 times
    "config": (try_config, 800),
    "run": (try_run, 400),
    "tokenizer": (try_tokenizer, 400),
    "import": (try_import, 400),
}


def fuzz(kind: str, cases: int, here: Path) -> Counter[int]:
    """Number of examples by exit code."""
    codes: Counter[int] = Counter()

    @hypothesis.settings(max_examples=cases, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(st.data())
    def example(data) -> None:
        codes[TRIED[kind][0](data.draw, here)] += 1

    if "FUZZ_SEED" in os.environ:
        example = hypothesis.seed(int(os.environ["FUZZ_SEED"]))(example)
    with watching(here, *CACHES):
        example()
    assert not any((here / "elsewhere").iterdir())
    return codes


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind == "run")) for kind in TRIED])
def test_a_changed_file_ends_a_verb_with_a_code_and_a_sentence(kind, stops, record_property):
    codes = fuzz(kind, TRIED[kind][1] // 16, stops)
    record_property("codes", dict(codes))
    assert sum(codes.values()) >= TRIED[kind][1] // 16 and codes[Exit.DONE] and codes.total() > codes[Exit.DONE]


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRIED)
def test_two_thousand_changed_files(kind, stops, record_property, capsys):
    cases = TRIED[kind][1] * int(os.environ.get("FUZZ_CASES", "2000")) // 2000
    codes = fuzz(kind, cases, stops)
    record_property("codes", dict(codes))
    with capsys.disabled():
        print(f"\n{kind}: {codes.total()} cases, by exit code {dict(sorted(codes.items()))}")
    assert codes.total() >= cases


def test_a_run_writes_into_its_directory_alone(here, monkeypatch):
    """The watched run above does, and the verbs that follow it."""
    monkeypatch.chdir(here / "elsewhere")
    with watching(here / "run", here / "exported", *CACHES):
        for line in (["eval", here / "run"], ["report", here / "run"], ["ckpt", "verify", here / "run"]):
            assert run(*line, limited=False)[0] == Exit.DONE
    with watching(here, *CACHES):  # a directory appears under another name first, beside it
        assert run("export", here / "run", here / "export", limited=False)[0] == Exit.DONE
    assert not any((here / "elsewhere").iterdir())


@pytest.mark.parametrize(
    ("misdeed", "seen"),
    [
        (lambda: time.sleep(9), "Hang"),
        (lambda: bytearray(3 * 2**30), "MemoryError"),
        (lambda: 1 / 0, "ZeroDivisionError"),
        (lambda: 9, ": 9"),
        (lambda: 2, ": 2"),  # without a word
        (lambda: print("\x1b[2J", file=sys.stderr) or 2, "x1b"),
    ],
)
def test_what_misbehaves_is_seen(misdeed, seen, monkeypatch):
    monkeypatch.setattr(contained, "SECONDS", 0.5)
    monkeypatch.setattr(contained, "main", lambda line: misdeed())
    with pytest.raises(AssertionError, match=seen):
        run("misbehaves")


def test_what_is_written_elsewhere_is_seen(tmp_path):
    (tmp_path / "inside").mkdir()
    for misdeed in (
        functools.partial((tmp_path / "file").write_text, "x"),
        (tmp_path / "directory").mkdir,
        functools.partial(os.rename, tmp_path / "file", tmp_path / "inside" / "file"),
        functools.partial(os.system, "true"),
    ):
        with pytest.raises(AssertionError), watching(tmp_path / "inside"):
            misdeed()
