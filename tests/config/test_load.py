import shutil
from pathlib import Path

import pytest
import yaml

from spmd_lm.config.data_sections import PythonStdlib, Synthetic, Task, Text
from spmd_lm.config.load import SHIPPED, dump, load, load_run, shipped
from spmd_lm.config.rope import LinearRope, YarnRope
from spmd_lm.config.schema import AdamW, Lion, RunConfig
from spmd_lm.errors import ConfigError

FOLDER = Path(__file__).parents[2] / "configs"
OTHER = ("sweeps", "prepare")  # files with schemas of their own
CONFIGS = sorted(path for path in FOLDER.rglob("*.yaml") if path.stem != "base" and path.parent.name not in OTHER)
NAME = "run.name: expected letters, digits, '.', '_' or '-', not beginning with '.'"
TINY = """
model: {layers: 2, width: 64, heads: 8, context: 32, vocab: 256}
data: {source: python-stdlib}
optim: {lr: 3e-4}
train: {steps: 20, batch: 16}
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes files by name into the working directory."""
    monkeypatch.chdir(tmp_path)

    def write(**files: str) -> None:
        for name, text in files.items():
            (tmp_path / f"{name}.yaml").write_text(text)

    return write


def problems(path: str, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    return caught.value.problems


# --- valid configurations ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(FOLDER)))
def test_every_shipped_configuration_loads_and_reads_back_equal(path, tmp_path):
    config = load(path)
    written = tmp_path / "config.yaml"
    written.write_text(dump(config))
    assert load(written) == config
    assert list(config.model_dump()) == [line[:-1] for line in dump(config).splitlines() if line[0] != " "]


@pytest.mark.parametrize("source", ["python-stdlib", "text", "synthetic"])
def test_a_section_writes_its_kind_first(source, write):
    write(a=TINY)
    path = ["data.path=x"] if source == "text" else []
    written = yaml.safe_load(dump(load("a.yaml", [f"data.source={source}", *path])))
    firsts = {name: next(iter(section)) for name, section in written.items()}
    assert {name: firsts[name] for name in ("model", "objective", "data", "optim")} == {
        "model": "kind",
        "objective": "kind",
        "data": "source",
        "optim": "kind",
    }


@pytest.mark.parametrize("name", ["a", "gpt2-124m_v1.5", "_", "-x", "été"])
def test_valid_run_names(name, write):
    write(a=TINY)
    assert load("a.yaml", [f"run.name={name}"]).run.directory == Path("runs", name)


@pytest.mark.parametrize(
    "directory, why",
    [
        ("~nouser/x", "expected ~ or the ~name of a user of this machine"),
        ("é" * 128, "expected names of at most 255 bytes between slashes"),
        ("runs/" + "a" * 256 + "/b", "expected names of at most 255 bytes between slashes"),
        ('"a\\0b"', "expected text without NUL characters"),
    ],
)
def test_an_impossible_directory_is_refused(directory, why, write):
    write(a=TINY)
    (problem,) = problems("a.yaml", f"run.dir={directory}")
    assert problem.startswith(f"command line: run.dir: {why}, got '")


def test_a_run_name_is_at_most_255_bytes_long(write):
    write(a=TINY)
    assert load("a.yaml", [f"run.name={'a' * 255}"]).run.directory == Path("runs", "a" * 255)
    (problem,) = problems("a.yaml", f"run.name={'a' * 256}")
    assert "run.name: " in problem and "255" in problem


def test_overrides_are_yaml_on_the_same_paths(write):
    write(a=TINY)
    config = load(
        "a.yaml", ["optim.lr=1e-3", "train.steps=5", "run.name=no", "checkpoint.async=false", "model={heads: 4}"]
    )
    assert (config.optim.lr, config.train.steps, config.run.name) == (1e-3, 5, "no")
    assert config.checkpoint.asynchronous is False
    assert (config.model.heads, config.model.width) == (4, 64)


def test_a_pattern_is_no_alias(write):
    write(a=TINY)
    assert load("a.yaml", ["data.source=text", "data.path=*.md"]).data == Text(source="text", path="*.md")


def test_a_base_is_relative_to_the_file_that_names_it(write, tmp_path):
    (tmp_path / "deep").mkdir()
    write(root=TINY)
    (tmp_path / "deep" / "middle.yaml").write_text("base: ../root.yaml\nmodel: {heads: 4}\n")
    write(top="base: deep/middle.yaml\nmodel: {layers: 3}\nremat:\n")
    model = load("top.yaml").model
    assert (model.layers, model.heads, model.width) == (3, 4, 64)


@pytest.mark.parametrize("overrides", [("data.source=text", "data.path=x"), ("data.path=x", "data.source=text")])
def test_a_change_of_kind_drops_the_old_keys(write, overrides):
    write(a=TINY.replace("{source: python-stdlib}", "{source: synthetic, branching: 8}"))
    assert load("a.yaml", overrides).data == Text(source="text", path="x")
    write(b="base: a.yaml\ndata: {source: python-stdlib}")
    assert load("b.yaml").data == PythonStdlib(source="python-stdlib")
    assert load("b.yaml", ["data.source=synthetic"]).data == Synthetic(
        source="synthetic"
    )  # not the 8 of two files below


def test_a_section_within_a_section_drops_them_too(write):
    scaling = "{kind: yarn, factor: 4, original_context: 64, beta_slow: 2}"
    write(a=TINY.replace("model: {", f"model: {{positions: rotary, rope_scaling: {scaling}, "))
    assert load("a.yaml", ["model.rope_scaling.factor=8"]).model.rope_scaling == YarnRope(
        kind="yarn", factor=8, original_context=64, beta_slow=2
    )
    for linear in (["={kind: linear, factor: 3}"], [".factor=3", ".kind=linear"]):
        scaling = load("a.yaml", [f"model.rope_scaling{each}" for each in linear]).model.rope_scaling
        assert scaling == LinearRope(kind="linear", factor=3)
    assert load("a.yaml", ["model.rope_scaling=null"]).model.rope_scaling is None


def test_the_same_kind_keeps_its_keys(write):
    write(a=TINY.replace("{source: python-stdlib}", "{source: text, path: x, validation_fraction: 0.2}"))
    assert load("a.yaml", ["data.source=text", "data.validation_fraction=0.3"]).data == Text(
        source="text", path="x", validation_fraction=0.3
    )


@pytest.mark.parametrize("more", [("data.source=text", "data.path=x"), ("data.source=python-stdlib",)])
def test_the_tokenizer_survives_a_change_of_text(write, more):
    """A model knows its token ids, whatever it reads; a synthetic chain has no tokenizer."""
    files = "path: a, validation_path: b, tokenizer: vocab.txt"
    write(a=TINY.replace("{source: python-stdlib}", f"{{source: task, task: jsonl, {files}}}"))
    data = load("a.yaml", more).data
    assert (data.tokenizer, data.validation_fraction) == ("vocab.txt", 0.1)  # files are no share
    assert load("a.yaml", [*more, "data.tokenizer=bytes"]).data.tokenizer == "bytes"
    assert load("a.yaml", ["data.source=synthetic"]).data == Synthetic(source="synthetic")


def test_a_task_needs_validation_files_not_a_fraction(write):
    write(
        a=TINY.replace(
            "{source: python-stdlib}", "{source: text, path: x, validation_fraction: 0.2, tokenizer: vocab.txt}"
        )
    )
    asked = "missing. Set it in the file, or as data"
    told = problems("a.yaml", "data.source=task", "data.task=mnli", "data.path=y")
    assert told == (f"a.yaml: data.validation_path: {asked}.validation_path=... on the command line.",)


# --- optimizers, whose kind has a default -----------------------------------------------------------------------------


def test_an_optimizer_is_adamw_unless_it_says_otherwise(write):
    write(a=TINY)
    assert load("a.yaml").optim == AdamW(lr=3e-4) == load("a.yaml", ["optim.kind=adamw"]).optim
    sections = load("a.yaml").model_dump()
    del sections["optim"]["kind"]
    assert RunConfig.model_validate(sections) == load("a.yaml")


def test_an_optimizer_of_another_kind_reads_back_equal(write):
    write(a=TINY.replace("lr: 3e-4", "kind: lion, lr: 1e-4, b2: 0.98, freeze: embedding.*"))
    config = load("a.yaml")
    assert config.optim == Lion(kind="lion", lr=1e-4, b1=0.9, b2=0.98, weight_decay=0.1, freeze="embedding.*")
    write(b=dump(config))
    assert load("b.yaml") == config


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("{}", "train.profile.steps: missing. Set it in the file, or as train.profile.steps=... on the command line."),
        ("{steps: [2, 3], step: 1}", "train.profile.step: unknown key. Did you mean 'steps'?"),
        ("3", "train.profile: expected a mapping of keys, got 3."),
        ("{steps: [1, 5000000000]}", "train.profile.steps[1]: must be at most 1073741824, got 5000000000."),
        ("{steps: [2]}", "train.profile.steps: List should have at least 2 items after validation, not 1, got [2]."),
    ],
)
def test_a_section_within_a_section_names_its_keys(write, value, problem):
    write(a=TINY)
    assert problems("a.yaml", f"train.profile={value}") == (f"command line: {problem}",)


def test_another_optimizer_keeps_the_schedule_and_asks_for_its_own_lr(write):
    """Lion's updates have another size, and its b2 another meaning."""
    write(a=TINY.replace("lr: 3e-4", "lr: 3e-4, warmup: 5, clip: 0.5, b2: 0.999, eps: 1e-6"))
    assert load("a.yaml", ["optim.kind=lion", "optim.lr=1e-4"]).optim == Lion(kind="lion", lr=1e-4, warmup=5, clip=0.5)
    missing = "optim.lr: missing. Set it in the file, or as optim.lr=... on the command line."
    assert problems("a.yaml", "optim.kind=lion") == (f"a.yaml: {missing}",)
    write(b="base: a.yaml\noptim: {kind: lion, lr: 1e-4}", c="base: b.yaml\noptim: {weight_decay: 1}")
    assert load("c.yaml").optim == Lion(kind="lion", lr=1e-4, warmup=5, clip=0.5, weight_decay=1)
    assert load("c.yaml", ["optim.kind=adamw", "optim.lr=1e-3"]).optim == AdamW(lr=1e-3, warmup=5, clip=0.5)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["optim.kind=lion", "optim.lr=1e-4", "optim.eps=1e-8"],
            "optim: 'eps' belongs to optim.kind=adamw, not lion. Remove it, or set optim.kind=adamw.",
        ),
        (["optim.kind=lino"], "optim.kind: expected adamw, lion or custom, got 'lino'. Did you mean 'lion'?"),
        (["optim.kind=3"], "optim.kind: expected adamw, lion or custom, got 3."),
        (["optim.wamup=5"], "optim: unknown key 'wamup'. Did you mean 'warmup'?"),
        (["optim.b2=1"], "optim.b2: must be less than 1, got 1. The default is 0.95."),
        (["optim.kind=lion", "optim.lr=1", "optim.b2=1"], "optim.b2: must be less than 1, got 1. The default is 0.99."),
    ],
)
def test_a_wrong_key_of_an_optimizer_is_reported_for_its_kind(write, overrides, message):
    write(a=TINY)
    assert problems("a.yaml", *overrides) == (f"command line: {message}",)


# --- runs that start from another run ---------------------------------------------------------------------------------

LATER = """
run: {init_from: runs/first}
data: {source: python-stdlib}
optim: {lr: 3e-4}
train: {steps: 20, batch: 16}
"""


@pytest.fixture
def first(write, tmp_path):
    """A run with its own tokenizer, and a configuration that starts from it."""
    write(first=TINY.replace("python-stdlib", "python-stdlib, tokenizer: elsewhere/vocab.txt"), later=LATER)
    kept = tmp_path / "runs" / "first" / "tokenizer"
    kept.mkdir(parents=True)
    (kept / "vocab.txt").write_text("[UNK]\n")
    kept.with_name("config.yaml").write_text(dump(load("first.yaml", ["model.norm_eps=1e-3"])))
    return Path("runs/first")


def test_init_from_takes_the_model_and_the_tokenizer(first):
    later, model = load("later.yaml"), load_run(first).model
    assert later.model == model and model.norm_eps == 1e-3
    assert later.data.tokenizer == "runs/first/tokenizer"
    assert (later.run.name, later.optim.lr) == ("run", 3e-4)  # and nothing else


def test_own_keys_override_those_of_init_from(first):
    later = load("later.yaml", ["model.context=16", "model.dropout=0.0", "data.tokenizer=vocab.txt"])
    changes = {"context": 16, "dropout": 0.0}
    assert later.model == load_run(first).model.model_copy(update=changes)
    assert later.data.tokenizer == "vocab.txt"


def test_a_task_takes_the_tokenizer_and_a_synthetic_chain_does_not(first):
    bert = ["model.kind=bert", "objective.kind=span", "data.source=task", "data.task=squad"]
    data = load("later.yaml", [*bert, "data.path=a", "data.validation_path=b"]).data
    assert isinstance(data, Task) and data.tokenizer == "runs/first/tokenizer"
    assert load("later.yaml", ["data.source=synthetic"]).data == Synthetic(source="synthetic")


def test_a_complete_model_needs_no_other_run(first, write):
    """A run's own file has one: it resumes although the run that it started from has been deleted."""
    later = load("later.yaml")
    write(own=dump(later))
    shutil.rmtree(first)
    assert load("own.yaml") == later
    write(own=TINY + "run: {init_from: runs/first}")
    assert load("own.yaml").run.init_from == "runs/first"


def test_an_unreadable_init_from_is_reported_and_no_model_keys_are_asked_for(first):
    gone = "run.init_from=runs/none: no such directory, so it is not a run. Give the directory of a run."
    assert problems("later.yaml", "run.init_from=runs/none") == (f"command line: {gone}",)
    file = first / "config.yaml"
    file.write_text(file.read_text().replace("heads: 8", "heads: 7"))
    assert problems("later.yaml", "model.contxt=16") == (
        f"later.yaml: run.init_from=runs/first: {file}: model.width=64 is not divisible by model.heads=7. "
        "Use model.heads=4 or 8, or model.width=63 or 70.",
        "command line: model: unknown key 'contxt'. Did you mean 'context'?",
    )
    assert problems("later.yaml", "run.init_from=~nouser/x")[0].startswith("command line: run.init_from: expected ~ ")


def test_a_run_uses_its_own_tokenizer_even_when_moved(first, tmp_path):
    assert load_run(first).data.tokenizer == "runs/first/tokenizer"
    moved = first.rename(tmp_path / "moved")
    run = load_run(moved, ["data.source=text", "data.path=x"])
    assert (run.run.directory, run.data.tokenizer) == (moved, str(moved / "tokenizer"))
    shutil.rmtree(moved / "tokenizer")
    assert load_run(moved).data.tokenizer == "elsewhere/vocab.txt"


@pytest.mark.parametrize("other", ["bytes", "vocab.txt"])
def test_a_run_refuses_another_tokenizer(first, other):
    with pytest.raises(ConfigError) as caught:
        load_run(first, [f"data.tokenizer={other}"])
    assert caught.value.problems == (
        f"data.tokenizer={other}: the model in runs/first was trained with the run's own tokenizer, "
        "and knows no other token ids. Remove this key.",
    )
    assert load_run(first, ["data.source=synthetic"]).data == Synthetic(source="synthetic")


def test_a_directory_without_a_configuration_is_not_a_run(first, tmp_path):
    with pytest.raises(ConfigError, match=r"nothing: no such directory, so it is not a run\."):
        load_run(tmp_path / "nothing")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ConfigError, match=r"nothing: no config\.yaml in this directory, so it is not a run\."):
        load_run(tmp_path / "nothing")


def test_a_directory_of_runs_suggests_one(first):
    with pytest.raises(ConfigError, match=r"runs: .* is not a run\. Give one of the runs in it, such as runs/first"):
        load_run(first.parent)
    (first.parent.parent / "sweep").mkdir()
    first.parent.rename(first.parent.parent / "sweep" / "cells")
    with pytest.raises(ConfigError, match=r"such as .*sweep/cells/first"):
        load_run(first.parent.parent / "sweep")


# --- problems ---------------------------------------------------------------------------------------------------------


def test_all_problems_are_reported_at_once_with_their_origins(write):
    write(
        root=TINY + "optm: {}\nparallel: {tensr: 4}\n",
        top="base: root.yaml\nmodel: {widht: 3, heads: 12}\ndata: {source: texts}\ncheckpoint: {every: no}\n",
    )
    assert problems("top.yaml", "train.steps=12x", "parallel.model=8", "nonsense", "optim.warmup=30.0") == (
        "command line: 'nonsense' is not an override. Write section.key=value.",
        "root.yaml: unknown section 'optm'. Did you mean 'optim'?",
        "top.yaml: model: unknown key 'widht'. Did you mean 'width'?",
        "top.yaml: data.source: expected python-stdlib, text, tokens, task, instructions, synthetic or custom, got "
        "'texts'. Did you mean 'text'?",
        "root.yaml: parallel: unknown key 'tensr'. Did you mean 'model'?",
        "command line: optim.warmup: expected a whole number, got 30.0. Write 30.",
        "command line: train.steps: expected a whole number, got '12x'.",
        "top.yaml: checkpoint.every: expected a whole number, got 'no'. The default is 0.",
        # Neither unknown keys nor invalid sections keep the checks of the others from running:
        "root.yaml, top.yaml: model.width=64 is not divisible by model.heads=12. "
        "Use model.heads=8 or 16, or model.width=60 or 72.",
        "top.yaml, command line: model.heads=12 is not divisible by parallel.model=8 (attention query, dim 'heads'). "
        "Use parallel.model=2 or 4, or model.heads=16.",
    )


@pytest.mark.parametrize(
    ("invalid", "override", "problem"),
    [
        ("train.steps=a", "parallel.data=0", "parallel.data=0 is not a number of devices"),
        ("objective.kind=a", "parallel.microbatches=3", "is not divisible by parallel.microbatches=3"),
        ("train.steps=a", "parallel={pipe: 2, chunks: 2}", "parallel.schedule=1f1b with parallel.chunks=2"),
    ],
)
def test_an_invalid_section_keeps_no_other_check_from_running(write, invalid, override, problem):
    write(top=TINY)
    found = problems("top.yaml", invalid, override)
    assert len(found) > 1 and any(problem in each for each in found)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.share_layers=yes", "model.share_layers: expected true or false, got 'yes'. Write true."),
        ("model.scan=no", "model.scan: expected auto or true or false, got 'no'. Write false."),
        ("run.name=3", 'run.name: expected text, got 3. Quote it: "3".'),
        ("optim.lr=fast", "optim.lr: expected a number, got 'fast'."),
        ("run.name=a/b c", f"{NAME}, got 'a/b c'. Write a-b-c."),
        ("run.name=..", f"{NAME}, got '..'. The default is 'run'."),
        ("run.name=.hidden", f"{NAME}, got '.hidden'. Write hidden."),
        ("run.name=''", f"{NAME}, got ''. The default is 'run'."),
        ('run.name="a\\n"', f"{NAME}, got 'a\\n'. Write a."),
        ("train.seed=4294967296", "train.seed: must be less than 4294967296, got 4294967296. The default is 0."),
        ("train.seed=-1", "train.seed: must be at least 0, got -1."),
        ("optim.lr=.inf", "optim.lr: expected a finite number, got inf."),
        ("optim.clip=.nan", "optim.clip: expected a finite number, got nan. The default is 1.0."),
        ("optim.lr=-1", "optim.lr: must be more than 0, got -1."),
        ("optim.lr='1e-3'", "optim.lr: expected a number, got '1e-3'. Write 1e-3, without quotes."),
        ("model.dropout=1.5", "model.dropout: must be at most 0.999, got 1.5. The default is 0.1."),
        ("parallel.zero=4", "parallel.zero: must be at most 3, got 4. The default is 0."),
        ("train.batch=0", "train.batch: must be at least 1, got 0."),
        ("train.batch=true", "train.batch: expected a whole number, got true."),
        ("train.batch=", "train.batch: expected a whole number, got nothing."),
        ("train=3", "train: expected a mapping of keys, got 3."),
        ("train.batch.size=3", "train.batch: expected a whole number, got a mapping."),
        (
            "data.source=[text]",
            "data.source: expected python-stdlib, text, tokens, task, instructions, synthetic or custom, got "
            "['text']. Did you mean 'text'?",
        ),
        (
            "precision.compute=bf16",
            "precision.compute: expected bfloat16, float16, float32 or float64, got 'bf16'. Did you mean 'bfloat16'?",
        ),
        ("train.learning_rate=3", "train: unknown key 'learning_rate'. Did you mean 'optim.lr'?"),
        ("model.n_layer=3", "model: unknown key 'n_layer'. Did you mean 'layers'?"),
        ("remat.xyz=3", "remat: unknown key 'xyz'. Known: policy, block_size."),
        ("checkpoint.asynchronous=true", "checkpoint: unknown key 'asynchronous'. Did you mean 'async'?"),
        (
            "data.path=x",
            "data: 'path' belongs to data.source=text, not python-stdlib. Remove it, or set data.source=text.",
        ),
        ("model..width=3", "'model..width=3' is not an override. Write section.key=value."),
        ("base=other.yaml", "base: belongs in a file. Write it there, or give other.yaml as the CONFIG."),
        ("base=", "base: belongs in a file. Write it there."),
        ("optim.lr='" + "1" * 400 + "'", "optim.lr: expected a number, got '11111111111111111111111111111111111 ..."),
        ("train.steps=1e300", "train.steps: expected a whole number, got 1e+300."),
        (f"run.name='{'a ' * 99}'", f"{NAME}, got '{'a ' * 17}a .... The default is 'run'."),
    ],
)
def test_a_wrong_key_or_value_is_reported_with_its_fix(write, override, message):
    write(a=TINY)
    (problem,) = problems("a.yaml", override)
    assert problem.startswith(f"command line: {message}") and len(problem) < 200


TASK = ("model.kind=bert", "data.source=task", "data.task=mnli", "data.path=a", "data.validation_path=b")
INSTRUCTIONS = ("data.source=instructions", "data.path=a")
LORA = ("adapter.kind=lora",)


@pytest.mark.parametrize(
    ("overrides", "old", "new"),
    [
        ((), "model.hidden=256", "mlp_width"),
        ((), "model.norm_kind=rms", "norm_type"),
        ((), "model.biases=false", "use_bias"),
        ((), "parallel.mask=true", "run_idle_stages"),
        ((), "remat.every=2", "block_size"),
        ((), "data.validation=0.2", "validation_fraction"),
        (("data.source=text", "data.path=x"), "data.validation=0.2", "validation_fraction"),
        (TASK, "data.validation=dev", "validation_path"),
        (("objective.kind=masked_lm", "model.kind=bert"), "objective.rate=0.2", "mask_prob"),
        (("objective.kind=masked_lm", "model.kind=bert"), "objective.short=0.2", "short_seq_prob"),
        ((*TASK, "objective.kind=span"), "objective.stride=64", "doc_stride"),
        ((*TASK, "objective.kind=span"), "objective.longest=20", "max_answer_length"),
        (INSTRUCTIONS, "data.packing=false", "pack"),
        (LORA, "adapter.r=4", "rank"),
        (LORA, "adapter.lora_rank=4", "rank"),
        (LORA, "adapter.lora_alpha=4", "alpha"),
        (LORA, "adapter.lora_dropout=0.1", "dropout"),
        (LORA, "adapter.target_modules=[query]", "targets"),
        (LORA, "adapter.use_rslora=true", "rslora"),
        (LORA, "adapter.load_in_4bit=true", "base"),
        (LORA, "adapter.load_in_8bit=true", "base"),
        (LORA, "adapter.quantization=nf4", "base"),
    ],
)
def test_an_old_key_is_refused_with_its_new_name(write, overrides, old, new):
    write(a=TINY)
    section, _, key = old.partition("=")[0].partition(".")
    message = f"command line: {section}: unknown key '{key}'. Did you mean '{new}'?"
    assert message in problems("a.yaml", *overrides, old)


def test_an_old_key_of_a_section_whose_kind_is_unknown_has_two_new_names(write):
    write(a=TINY.replace("source: python-stdlib", ""))
    told = "command line: data: unknown key 'validation'. Did you mean 'validation_fraction' or 'validation_path'?"
    assert told in problems("a.yaml", "data.validation=0.2")


def test_an_old_value_is_refused_with_its_new_name(write):
    write(a=TINY)
    choices = "expected none, selective, residual, block, full or offload, got 'every'"
    assert problems("a.yaml", "remat.policy=every") == (
        f"command line: remat.policy: {choices}. Did you mean 'block'?",
    )


def test_a_value_of_several_types_is_one_problem(write):
    write(a=TINY.replace("python-stdlib", "text"))
    assert problems("a.yaml", "data.path=3") == (
        'command line: data.path: expected text or a list, got 3. Quote it: "3".',
    )


def test_a_wrong_item_of_a_list_is_named(write):
    write(a=TINY.replace("python-stdlib", "text"))
    assert problems("a.yaml", "data.path=[x, 2]") == (
        'command line: data.path[1]: expected text, got 2. Quote it: "2".',
    )


def test_a_missing_file_is_reported_with_those_that_exist(write, tmp_path):
    assert problems("runs/nope") == ("runs/nope: no such file or run: there is no directory runs.",)
    (tmp_path / "runs" / "quickstart").mkdir(parents=True)
    assert problems("runs/nope") == ("runs/nope: no such file or run. There is none in runs.",)
    (tmp_path / "runs" / "quickstart" / "config.yaml").write_text(TINY)
    assert problems("runs/nope") == ("runs/nope: no such file or run. There is runs/quickstart.",)
    assert problems("runs/quickstrat") == ("runs/quickstrat: no such file or run. Did you mean runs/quickstart?",)
    assert problems("x.yaml") == ("x.yaml: no such file. There is none in this directory.",)
    write(**dict.fromkeys("klmnopqr", TINY))
    assert problems("x")[0].endswith("There is k.yaml, l.yaml, m.yaml, n.yaml, o.yaml, p.yaml and more.")


SHIPPED_NAMES = [str(path.relative_to(FOLDER).with_suffix("")) for path in CONFIGS]


@pytest.mark.parametrize("name", [name for name in SHIPPED_NAMES if "finetune/" not in name])
def test_a_shipped_configuration_is_found_by_its_name(name, write):
    """The name works in an empty directory, and as a base."""
    write(mine=f"base: {name}\nrun: {{name: mine}}")
    config, mine = load(name), load("mine.yaml")
    assert config == load(FOLDER / f"{name}.yaml") and (mine.run.name, mine.model) == ("mine", config.model)


def test_every_file_is_shipped(tmp_path):
    """The package has them all, and a copy of it, as in a wheel, real ones."""
    files = {str(path.relative_to(FOLDER)): path.read_bytes() for path in FOLDER.rglob("*.yaml")}
    assert shipped().keys() == {name.removesuffix(".yaml") for name in files}
    shutil.copytree(SHIPPED, tmp_path / "copy")
    assert files == {str(p.relative_to(tmp_path / "copy")): p.read_bytes() for p in (tmp_path / "copy").rglob("*.yaml")}


def test_what_is_there_comes_before_what_is_shipped(write, tmp_path):
    (tmp_path / "quickstart").write_text(TINY)
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "124m").symlink_to(tmp_path / "nowhere")
    assert load("quickstart").train.steps == 20
    assert problems("gpt2/124m")[0].startswith("gpt2/124m: no such file")
    write(mine="base: quickstart")
    assert load("mine.yaml").train.steps == 20


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("configs/gpt2/124m.yaml", "gpt2/124m"),
        ("124m", "gpt2/124m"),
        ("quikstart", "quickstart"),
        ("gpt2/124", "gpt2/124m"),
        ("layouts", "sweeps/layouts"),
        ("configs/prepare/python-stdlib", "prepare/python-stdlib"),
    ],
)
def test_a_name_like_a_shipped_one_is_asked_about(given, meant, write):
    """Files that are there are meant first."""
    assert f"Did you mean {meant}, which is shipped?" in problems(given)[0]
    write(b=TINY, mine=f"base: {given}x")
    assert f"Did you mean {meant}, which is shipped?" in problems("mine.yaml")[0]


@pytest.mark.parametrize(
    "name", ["../pyproject", "/etc/passwd", "gpt2", "quickstart.yaml", "", "a\0b", "gpt2/../debug"]
)
def test_nothing_else_is_a_shipped_name(name, write):
    assert len(problems(name)) == 1


def test_missing_keys_are_reported_for_the_file_that_was_given(write):
    write(root="model: {layers: 2, width: 64, heads: 8, context: 32, vocab: 256}", top="base: root.yaml\ntrain:\n")
    assert problems("top.yaml") == (
        "top.yaml: data.source: missing. Choose python-stdlib, text, tokens, task, instructions, synthetic or custom.",
        "top.yaml: optim.lr: missing. Set it in the file, or as optim.lr=... on the command line.",
        "top.yaml: train.steps: missing. Set it in the file, or as train.steps=... on the command line.",
        "top.yaml: train.batch: missing. Set it in the file, or as train.batch=... on the command line.",
    )


def test_a_text_source_needs_a_path(write):
    write(a=TINY)
    assert "data.path: missing" in problems("a.yaml", "data.source=text")[0]
    assert "names no file" in problems("a.yaml", "data.source=text", "data.path=[]")[0]


def test_duplicate_keys_do_not_hide_other_problems(write):
    write(a=TINY + "train: {steps: 20, batch: 16x}\n")
    assert problems("a.yaml") == (
        "a.yaml: line 6: duplicate key 'train', first on line 5. Remove one.",
        "a.yaml: train.batch: expected a whole number, got '16x'.",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base: d.yaml", "a.yaml: base: d.yaml: no such file. Did you mean c.yaml?"),
        ("base: [c.yaml]", "a.yaml: base: expected the name of one file"),
        ("base: c.yaml", "c.yaml: base: circular chain: a.yaml -> c.yaml -> a.yaml."),
        ("base: a.yaml", "a.yaml: base: circular chain: a.yaml -> a.yaml."),
        ("base: .", "a.yaml: base: .: cannot be read: Is a directory."),
        ("- model", "a.yaml: expected sections of keys, got ['model']."),
        ("model: [", "a.yaml: line 1: not YAML:"),
    ],
)
def test_an_unusable_file_is_reported(write, text, message):
    write(a=text, c="base: a.yaml")
    (problem,) = problems("a.yaml")
    assert problem.startswith(message)


def test_a_file_that_is_not_utf8_is_reported(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_bytes(b"run: {name: \xff}")
    assert problems(path)[0] == f"{path}: byte 12 is not UTF-8. Save the file as UTF-8 text."
