"""Inputs of tasks: files, conventions of WikiText, and the messages for what cannot be evaluated."""

import json
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_lm.cli import main
from spmd_lm.config.load import dump
from spmd_lm.data.tokenizers.tokenizer import ByteTokenizer, SubwordTokenizer
from spmd_lm.errors import ConfigError, DataError, Exit
from spmd_lm.evaluation.continuations import Encoder, continuation_windows
from spmd_lm.evaluation.scoring import Scored
from spmd_lm.evaluation.tasks.choice import race_question
from spmd_lm.evaluation.tasks.lambada import last_word
from spmd_lm.evaluation.tasks.task import find_tasks
from spmd_lm.evaluation.tasks.wikitext import count_words, detokenize
from spmd_lm.evaluation.zero_shot import evaluate_tasks, make_tasks, require_causal
from tests.data.token_files.conftest import write_dataset
from tests.evaluation.items import write_items, write_lines
from tests.helpers import ORIGINAL_BERT, TASKS, make_config
from tests.prepare.corpora import make as prepare
from tests.published import published

BYTES = {"source": "text", "path": "unread.txt"}
CONFIG = make_config(model={"vocab": 256}, data=BYTES)  # a context of 16 bytes
ENCODER = Encoder(ByteTokenizer(), 256)


# --- WikiText


@pytest.mark.parametrize(
    ("original", "text"),
    [
        ("a well @-@ known 1 @,@ 000 @.@ 5", "a well-known 1,000.5"),
        ("He came , saw ; and won ! Why ? So : thus . Then", "He came, saw; and won! Why? So: thus. Then"),
        ('he said " so it is " ( or [ so ] ) and { that }', 'he said "so it is" (or [so]) and {that}'),
        ("the boys ' dog", "the boys' dog"),
        ("Bob 's dog", "Bob's dog"),
        ("of ' his own '", "of 'his own'"),
        (" = = = Title = = = \n \n = Head = ", " === Title ===\n\n= Head = "),
        ("90 \N{DEGREE SIGN} N of N = 1", "90\N{DEGREE SIGN}N of 1 = 1"),
    ],
)
def test_wikitext_is_written_as_people_write_it(original, text):
    assert detokenize(original) == text


def gpt2(directory) -> SubwordTokenizer:
    for name, source in (("vocab.json", "gpt2_encoder.json"), ("merges.txt", "gpt2_vocab.bpe")):
        shutil.copyfile(published(source), directory / name)
    return SubwordTokenizer(str(directory))


def test_the_published_counts_of_wikitext_103(tmp_path):
    """245,566 words and 270,329 tokens of GPT-2, as Megatron-LM's authors counted."""
    path = published("wikitext103_test.tokens.txt")
    if not path.exists():
        pytest.skip(f"{path.name} is not in SPMD_LM_DATA")
    text = path.read_text().strip()
    assert count_words(text) == 245_566 and len(gpt2(tmp_path).encode(detokenize(text))) == 270_329


def test_counts_of_wikitext_103_s_validation_text(tmp_path):
    """The task and the tokenizers library alone agree."""
    tokenizers = pytest.importorskip("tokenizers")
    path = published("wikitext103_valid.tokens.txt")
    gpt2(tmp_path)
    data = BYTES | {"tokenizer": str(tmp_path)}
    (task,) = make_tasks(make_config(model={"vocab": 50257, "context": 64}, data=data), [f"wikitext={path}"])
    text = path.read_text().strip()
    library = tokenizers.ByteLevelBPETokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    ids = library.encode(detokenize(text)).ids
    assert task.words == len(text.split(" ")) > 210_000
    assert task.num_tokens == len(ids) < task.words * 1.2 and task.windows.tokens.tolist() == ids
    assert (np.diff(task.windows.start) == 32).all()


# --- items


@pytest.mark.slow
def test_published_passages_and_articles(tmp_path):
    """A passage is read to its last token, and its last word scored in full."""
    tokenizer = gpt2(tmp_path)
    path, articles = published("lambada_first1000.jsonl"), published("race_dev_middle.jsonl")
    config = make_config(model={"vocab": 50257, "context": 1024}, data=BYTES | {"tokenizer": str(tmp_path)})
    (task,) = make_tasks(config, [f"lambada={path}"])
    w, texts = task.windows, [json.loads(line)["text"] for line in path.read_text().splitlines()]
    assert len(w.start) == len(texts) == 1000 and not task.truncated
    for text, start, first, stop in zip(texts, w.start, w.first, w.stop, strict=True):
        assert w.tokens[start:stop].tolist() == tokenizer.encode(text).tolist()
        assert tokenizer.decode(w.tokens[first:stop]).lstrip() == text.split()[-1]
    (race,) = make_tasks(make_config(model={"vocab": 256, "context": 4096}, data=BYTES), [f"race={articles}"])
    assert len(race.label) == 1436 and len(race.windows.start) == 4 * 1436 and not race.truncated


def test_the_test_split_of_prepared_data_is_scored(tmp_path):
    """A blend's test splits are all scored."""
    for name, splits in {"a": ["train", "test"], "b": ["train"], "c": ["train", "test"]}.items():
        given = {split: [[[97 + i, 98, 99]]] for i, split in enumerate(splits)} | {"validation": []}
        write_dataset(tmp_path / name, given, vocab=256, eos=0)

    def task(*names: str):
        blend = [{"path": str(tmp_path / name), "weight": 1.0} for name in names]
        config = make_config(model={"vocab": 256}, data={"source": "tokens", "blend": blend})
        (made,) = make_tasks(config, ["test"])
        return made

    assert task("a").windows.tokens.tolist() == [98, 98, 99, 0] and task("a").num_bytes == 3
    assert task("a", "b", "c").num_tokens == 8
    with pytest.raises(DataError, match=r"^test: no test split in .*/b\. Prepare it with .* split\.test=0\.01"):
        task("b")
    with pytest.raises(ConfigError, match=r"^test: data\.source=text has no test split.* Use validation"):
        make_tasks(CONFIG, ["test"])
    config = make_config(model={"vocab": 256}, data={"source": "tokens", "path": str(tmp_path / "a")})
    with pytest.raises(DataError, match=r"the split has 0 tokens\. Raise split\.validation where the data is prepared"):
        make_tasks(config, ["validation"])


def test_tasks_are_found_in_their_package():
    assert [*find_tasks()] == ["choice", "lambada", "race", "test", "text", "validation", "wikitext"]


@given(st.text(alphabet="ab \n", min_size=1, max_size=12), st.text(alphabet="ab ", min_size=1, max_size=6))
def test_a_context_and_its_continuation_are_one_text(context, text):
    """White space between them is the continuation's."""
    item = ENCODER.continuation(context, text, "here")
    whole, stripped = (context + text).encode(), context.rstrip().encode()
    start = b"" if stripped else b"\0"
    assert bytes(item.context.tolist()) == start + stripped
    assert bytes(item.context.tolist() + item.ids.tolist()) == start + whole


def test_a_context_is_truncated_from_the_left():
    pairs = [("0123456789abcdefghij", " klm"), ("abcdef", " ghi"), ("0123456789abc", "def"), ("0123456789abcd", "def")]
    items = [ENCODER.continuation(*pair, "here") for pair in pairs]
    windows, truncated = continuation_windows(items, 16)
    read = [bytes(windows.tokens[a:b].tolist()) for a, b in zip(windows.start, windows.stop, strict=True)]
    assert read == [
        b"789abcdefghij klm",
        b"abcdef ghi",
        b"0123456789abcdef",
        b"0123456789abcddef",
    ]
    assert truncated.tolist() == [True, False, False, False]
    assert (windows.stop - windows.first).tolist() == [4, 4, 3, 3]


def test_the_last_word_of_a_passage():
    item = last_word(ENCODER, " A day\nin April \n", "here")
    assert bytes(item.context.tolist()) == b" A day\nin" and bytes(item.ids.tolist()) == b" April"


def test_a_text_is_resampled_in_blocks_of_neighbours(tmp_path):
    """A short text is resampled by token; two documents have a window each and no token in common."""
    (tmp_path / "a.txt").write_text("a" * 13)
    (tmp_path / "b.txt").write_text("b" * 9)
    (task,) = make_tasks(CONFIG, [f"text={tmp_path}"])
    assert task.windows.start.tolist() == [0, 13]
    found = task.figures(Scored(-np.arange(20.0), np.zeros(20, bool), np.array([0, 12, 20])))
    assert found.metrics["nats_per_token"] == 9.5 and found.metrics["nats_per_byte"] == pytest.approx(190 / 22)
    assert (found.n, found.counts) == (20, {"tokens": 22, "skipped": 0})
    low, high = found.ci95["nats_per_token"]
    assert high - low == pytest.approx(2 * 1.96 * np.arange(20).std() / 20**0.5, rel=0.1)
    (tmp_path / "a.txt").write_text("a" * 40)
    (task,) = make_tasks(CONFIG, [f"text={tmp_path}/a.txt"], 5)
    assert task.windows.start.tolist() == [0, 5, 10, 15, 20, 25]
    equal_neighbours = np.repeat(np.arange(64.0), 32)  # of a long one, 64 blocks
    low, high = task.figures(Scored(-equal_neighbours, equal_neighbours > 99, np.array([0, 2048]))).ci95[
        "nats_per_token"
    ]
    assert high - low == pytest.approx(2 * 1.96 * np.arange(64).std() / 8, rel=0.1)


def test_choices_are_compared_by_likelihood_and_by_byte(tmp_path):
    """UTF-8 bytes, without the space that joins; of equal scores the first wins; a question is truncated once."""
    lines = [
        {"context": "x" * 20, "choices": ["\N{DEGREE SIGN}", " no", "yes!"], "label": 1},
        {"context": "a ", "choices": ["b", "c"], "label": 0},
    ]
    (task,) = make_tasks(CONFIG, [f"choice={write_lines(tmp_path / 'choice.jsonl', lines)}"])
    assert task.num_bytes.tolist() == [2, 2, 4, 1, 1] and task.truncated == 1
    ids = [bytes(task.windows.tokens[a:b].tolist()) for a, b in zip(task.windows.first, task.windows.stop, strict=True)]
    assert ids == [b" \xc2\xb0", b" no", b" yes!", b" b", b" c"]
    ends = np.cumsum([0, *map(len, ids)])
    of_choices = np.array([-2.0, -3, -3.5, -1, -1])
    scored = Scored(np.repeat(of_choices, np.diff(ends)) / np.repeat(np.diff(ends), np.diff(ends)), ends > 99, ends)
    figures = task.figures(scored)
    assert figures.metrics == {"accuracy": 0.5, "accuracy_per_byte": 0.5}  # -1, -1.5, -0.875 per byte
    better = scored._replace(log_likelihood=np.where(np.arange(ends[-1]) < 3, 2, 1) * scored.log_likelihood)
    assert task.figures(better).metrics == {"accuracy": 1.0, "accuracy_per_byte": 0.5}


@pytest.mark.parametrize(
    ("question", "context", "choices"),
    [
        ("We can   _  .", "So.\nWe can", [" go .", " see it ."]),
        ("What now?", "So.\nWhat now?", [" go", " see it"]),
        ("_ is it.", "So.", ["\ngo is it.", "\nsee it is it."]),
        ("un_ed, re_ed", "So.\nun", ["goed, regoed", "see ited, resee ited"]),
    ],
)
def test_an_option_fills_the_blank_or_follows_the_question(question, context, choices):
    asked = race_question("here", "So.", question, ["go", "see  it"], 0)
    assert (asked.context, asked.choices) == (context, choices)


# --- bad input


LINES = {
    "broken": ('{"text": "a b"}\n{"text": ', DataError, r"broken.jsonl: line 2: Invalid JSON.* A line is \{\"text\""),
    "other key": ('{"txt": "a b"}', DataError, r"other key.jsonl: line 1: text: Field required"),
    "one word": ('\n{"text": " word "}', DataError, r"line 2: ' word ' has no last word after a context. Give two"),
    "no lines": (" \n", DataError, r"no passages. A line is"),
    "long word": (
        '{"text": "a bcdefghijklmnopqr"}',
        DataError,
        r"line 1: a continuation of 18 tokens, but .*=16 at",
    ),
}


@pytest.mark.parametrize("case", LINES)
def test_bad_passages(case, tmp_path):
    content, error, message = LINES[case]
    (tmp_path / f"{case}.jsonl").write_text(content)
    with pytest.raises(error, match=message):
        make_tasks(CONFIG, [f"lambada={tmp_path}/{case}.jsonl"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"context": "a", "choices": ["b"], "label": 0}, "line 1: choices: List should have at least 2 items"),
        ({"context": "a", "choices": ["b", "c"], "label": 2}, "line 1: label 2, but 2 choices, counted from 0"),
        ({"context": "a", "choices": ["b", "c"]}, "line 1: label: Field required"),
        ({"context": "a", "choices": ["b", " "], "label": 0}, "line 1: an empty choice"),
        ({"context": "a", "choices": ["b", "c" * 17], "label": 0}, "line 1: a continuation of 18 tokens"),
    ],
)
def test_bad_choices(line, message, tmp_path):
    path = write_lines(tmp_path / "choice.jsonl", [line])
    with pytest.raises(DataError, match=message):
        make_tasks(CONFIG, [f"choice={path}"])


@pytest.mark.parametrize("name", ["text", "wikitext"])
def test_a_file_of_one_token_among_others_is_skipped(name, tmp_path):
    for file, text in {"a.txt": "a", "b.txt": "so it was", "c.txt": "and so on"}.items():
        (tmp_path / file).write_text(text)
    (task,) = make_tasks(CONFIG, [f"{name}={tmp_path}"])
    found = task.figures(Scored(-np.ones(16), np.zeros(16, bool), np.array([0, 8, 16])))
    assert found.counts == {"tokens": 18, "skipped": 1} | ({"words": 6} if name == "wikitext" else {})
    assert found.metrics["nats_per_byte"] == pytest.approx(16 / 18)
    with pytest.raises(DataError, match=r"a\.txt: 1 token, but a perplexity needs 2"):
        make_tasks(CONFIG, [f"{name}={tmp_path}/a*"])


# --- the validation split


def test_bytes_of_the_validation_split(tmp_path):
    """Prepared data counts the documents' bytes, whatever their tokens spell; other data, its tokens' bytes."""
    lines = write_lines(tmp_path / "a.jsonl", [{"text": f"Naïve Ärger  {i}!"} for i in range(60)])
    for kind, bytes_told in (("wordpiece", False), ("bpe", True)):
        out = tmp_path / kind
        report = prepare(out, lines, tokenizer={"train": kind, "vocab_size": 300}, split={"validation": 0.4})
        vocabulary = {"tokenizer": str(out / "tokenizer")}
        data = vocabulary | {"source": "tokens", "path": str(out)}
        (task,) = make_tasks(make_config(model={"vocab": 300}, data=data), ["validation"])
        assert task.num_bytes == report["splits"]["validation"]["text_bytes"] > 100
        (tmp_path / "b.txt").write_text("Naïve Ärger  " * 100)
        in_memory = vocabulary | BYTES | {"path": str(tmp_path / "b.txt"), "validation_fraction": 0.5}
        config = make_config(model={"vocab": 300}, data=in_memory | vocabulary)
        (task,) = make_tasks(config, ["validation"])
        assert (task.num_bytes == pytest.approx(800, rel=0.1)) if bytes_told else task.num_bytes is None


def test_a_validation_split_without_tokens(tmp_path):
    prepare(tmp_path / "out", write_lines(tmp_path / "a.jsonl", [{"text": "one " * 100}]), split={"validation": 0.0})
    config = make_config(model={"vocab": 256}, data={"source": "tokens", "path": str(tmp_path / "out")})
    with pytest.raises(DataError, match=r"^validation: the split has 0 tokens"):
        make_tasks(config, ["validation"])


@pytest.mark.parametrize("task", ["text", "wikitext"])
@pytest.mark.parametrize(("text", "message"), [("", "the file is empty"), ("a", "1 token, but a perplexity needs 2")])
def test_a_text_that_predicts_nothing(task, text, message, tmp_path):
    (tmp_path / "text.txt").write_text(text)
    with pytest.raises(DataError, match=message):
        make_tasks(CONFIG, [f"{task}={tmp_path}/text.txt"])


def test_a_token_outside_of_the_vocabulary(tmp_path):
    (tmp_path / "text.txt").write_text("so \N{DEGREE SIGN}")
    with pytest.raises(DataError, match=r"text.txt: token 194 is not below model.vocab=128. Correct the text, or"):
        make_tasks(make_config(model={"vocab": 128}, data=BYTES), [f"text={tmp_path}/text.txt"])


def test_words_for_a_model_that_reads_ids(tmp_path):
    path = write_lines(tmp_path / "lambada.jsonl", [{"text": "3 1 4"}, {"text": "so it was"}])
    with pytest.raises(DataError, match=r"lambada.jsonl: line 2: prompt 'so it': a model of synthetic data reads"):
        make_tasks(make_config(), [f"lambada={path}"])


def test_an_empty_context_needs_a_token_that_starts_a_document(tmp_path):
    path = write_lines(tmp_path / "choice.jsonl", [{"context": "", "choices": ["1", "2"], "label": 0}])
    with pytest.raises(DataError, match="line 1: an empty context, and this run's tokenizer has no token to start"):
        make_tasks(make_config(), [f"choice={path}"])


@pytest.mark.parametrize(
    ("tasks", "stride", "message"),
    [
        (["lambda=x"], None, "^--task: lambda=x: no task 'lambda'. Did you mean lambada"),
        (
            ["nope"],
            None,
            "^--task: nope: no task 'nope'. Tasks: choice, lambada, race, test, text, validation, wikitext.",
        ),
        (["lambada"], None, "^--task: lambada: no file is named. Write lambada=PATH."),
        (["validation=x"], None, "^--task: validation=x: this task reads the run's own data. Write validation."),
        (["text=TEXT", "text=TEXT"], None, "^--task: text is given twice"),
        (["text=TEXT"], 17, "^--stride 17: windows of model.context=16 tokens move by 1 to 16.* Use --stride 16."),
        (["text=TEXT"], 0, "^--stride 0: .* Use --stride 1."),
        (
            ["lambada=TEXT"],
            4,
            "^--stride 4: no task here has windows that move; test, text, validation, wikitext have.",
        ),
        ([], 4, "^--stride 4: no task here"),
    ],
)
def test_bad_options(tasks, stride, message, tmp_path):
    (tmp_path / "text.txt").write_text("so it was")
    with pytest.raises(ConfigError, match=message):
        evaluate_tasks(CONFIG, [task.replace("TEXT", str(tmp_path / "text.txt")) for task in tasks], stride)


@pytest.mark.parametrize("kind", ["masked_lm", *TASKS])
def test_a_run_without_likelihoods(kind):
    """No file is read before the error."""
    masked = {"objective": {"kind": "masked_lm"}} if kind == "masked_lm" else TASKS[kind]
    config = make_config(**masked | {"model": ORIGINAL_BERT})
    with pytest.raises(ConfigError, match=f"objective.kind={config.objective.kind} gives a text no likelihood"):
        evaluate_tasks(config, ["lambada=missing"])
    require_causal(CONFIG)


def test_the_command_says_it_in_one_line(tmp_path, capsys):
    """The exit code is the one that scripts see, and the checkpoint is not opened."""
    config = CONFIG.model_copy(update={"run": CONFIG.run.model_copy(update={"dir": str(tmp_path)})})
    (tmp_path / "config.yaml").write_text(dump(config))
    specs = write_items(tmp_path)
    (tmp_path / "bad.jsonl").write_text(json.dumps({"text": 3}))
    for options, code, message in (
        (["--task", "lambada=missing.jsonl"], Exit.DATA, "--task: lambada=missing.jsonl: no such file or directory"),
        (
            ["--task", f"lambada={tmp_path}/bad.jsonl"],
            Exit.DATA,
            f"--task: {tmp_path}/bad.jsonl: line 1: text: Input should",
        ),
        (["--task", "lambda=x"], Exit.CONFIG, "--task: lambda=x: no task 'lambda'. Did you mean lambada?"),
        (["--task", specs[0], "--stride", "0"], Exit.CONFIG, "spmd-lm eval: argument --stride: expected a whole"),
        (["--task", specs[0], "--stride", "99"], Exit.CONFIG, "--stride 99: windows of model.context=16 tokens"),
        (["--stride", "3"], Exit.CONFIG, "--stride 3: no task here has windows that move"),
        (["--task", specs[0]], Exit.CHECKPOINT, f"{tmp_path}/checkpoints holds no checkpoint"),
    ):
        assert main(["eval", str(tmp_path), *options]) == code
        out, err = capsys.readouterr()
        assert out == "" and err.startswith(f"error: {message}") and err.count("\n") == 1
