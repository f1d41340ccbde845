"""Conversations as token ids: those of transformers, with answers alone learned."""

import json

import numpy as np
import pytest

from spmd_lm.config.data_sections import Instructions
from spmd_lm.data.corpus import load_data
from spmd_lm.data.instructions.dataset import InstructionDataset, InstructionSplit
from spmd_lm.errors import ConfigError, DataError
from tests.chat_files import (
    ANSWER,
    ANSWERS,
    CHATML,
    CONVERSATIONS,
    GEMMA,
    TEMPLATES,
    USER,
    VOCAB,
    turns,
    write_lines,
    write_tokenizer,
)


def load(path, tokenizer="bytes", vocab=VOCAB, context=4096, **keys) -> InstructionDataset:
    section = Instructions(source="instructions", path=str(path), tokenizer=str(tokenizer), **keys)
    return load_data(section, 0, vocab, context=context)


def conversations(split: InstructionSplit) -> list[tuple[list[int], list[int]]]:
    """Ids of each conversation, and ids of its answers."""
    parts = [slice(*pair) for pair in zip(split.bounds[:-1], split.bounds[1:], strict=True)]
    return [(split.tokens[part].tolist(), split.tokens[part][split.is_answer[part]].tolist()) for part in parts]


@pytest.mark.parametrize("style", TEMPLATES)
def test_ids_are_those_of_transformers(tmp_path, style):
    transformers = pytest.importorskip("transformers")
    directory = write_tokenizer(tmp_path / "t", TEMPLATES[style])
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    lines = [{"messages": messages, "tools": tools} for messages, tools in CONVERSATIONS[style]]
    dataset = load(write_lines(tmp_path / "a.jsonl", *lines), directory)
    bos = theirs.convert_tokens_to_ids("<s>")
    for (ids, learned), line, texts in zip(conversations(dataset.train), lines, ANSWERS[style], strict=True):
        given = {"conversation": line["messages"], "tools": line["tools"]}
        assert ids == theirs.apply_chat_template(**given, return_dict=False)
        assert dataset.tokenizer.decode(learned) == "".join(texts)
        assert ids.count(bos) <= 1, "a template that writes it gets no second one"


def test_completions(tmp_path):
    path = write_lines(
        tmp_path / "a.jsonl",
        {"prompt": "Why?", "completion": " is", "id": 3},
        {"prompt": "Why? ", "completion": "is"},
        {"prompt": "", "completion": "Yes</s>"},
    )
    tokenizer = write_tokenizer(tmp_path / "t")
    made = load(path, tokenizer)
    decode, texts = made.tokenizer.decode, conversations(made.train)
    assert [decode(ids) for ids, _ in texts] == ["<s>Why? is</s>", "<s>Why? is</s>", "<s>Yes</s>"]
    assert [decode(learned) for _, learned in texts] == [" is</s>", "</s>", "Yes</s>"], "a token is where it begins"
    assert made.train.resplit == 1  # "Why? " ends in the space that begins " is"
    assert "1 whose answer follows other tokens than generate begins from" in made.describe()
    assert load(path).train.resplit == 0
    assert conversations(load(path).train)[0] == ([0, *b"Why? is", 0], [*b" is", 0])
    assert conversations(load(path, bos=False).train)[0] == ([*b"Why? is", 0], [*b" is", 0])


def test_what_is_too_long_is_cut_and_counted(tmp_path):
    lines = [{"prompt": "12", "completion": "3456789"}, {"prompt": "123456789", "completion": "x"}, turns("1")]
    path = write_lines(tmp_path / "a.jsonl", *lines)
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    made = load(path, context=7, validation_path=path, chat_template=str(tmp_path / "t.jinja"))
    assert conversations(made.train) == [([0, *b"1234567"], [*b"34567"])]
    line = made.describe()
    assert f"{path}: 1 training conversations, 1 validation conversations, 2 truncated to 8 tokens" in line
    assert "4 dropped, with no answer in 8 tokens, 16 tokens, 10 of them answers, sha256 " in line
    unanswered = write_lines(tmp_path / "b.jsonl", {"messages": [{"role": "user", "content": "1"}]})
    with pytest.raises(DataError, match=r"no line has an answer: a message with the role assistant"):
        load(unanswered, context=7, chat_template=str(tmp_path / "t.jinja"))
    with pytest.raises(DataError, match=r"no line has an answer in its first 3 tokens\. Raise model\.context"):
        load(write_lines(tmp_path / "b.jsonl", lines[1]), context=2)


def test_the_fingerprint_is_of_tokens_and_answers(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", turns("a", "b"), turns("c", "d"))
    write_tokenizer(tmp_path / "t", CHATML)
    prints = {load(path, tmp_path / "t").fingerprint, load(path, tmp_path / "t", validation_path=path).fingerprint}
    (tmp_path / "t" / "chat_template.jinja").write_text(CHATML.replace("<|im_start|>", "<|x|>"))
    prints.add(load(path, tmp_path / "t").fingerprint)
    prints.add(load(path, tmp_path / "t", context=28).fingerprint)
    assert len(prints) == 4 and load(path, tmp_path / "t", context=28).fingerprint in prints


WRONG = {
    "no JSON": ("{", "line 2: Invalid JSON"),
    "no object": ("[]", "line 2: Input should be an object"),
    "neither": ('{"text": "a"}', "line 2: it has neither prompt and completion nor messages. A line is"),
    "both": ('{"prompt": "", "completion": "", "messages": [{"role": "user", "content": ""}]}', "line 2: it has both"),
    "half": ('{"prompt": "a"}', "line 2: completion: Field required"),
    "empty": ('{"messages": []}', "line 2: messages: List should have at least 1 item"),
    "no role": ('{"messages": [{"content": "a"}]}', "line 2: messages[0].role: Field required"),
    "no content": ('{"messages": [{"role": "assistant"}]}', "line 2: messages[0]: content: Field required"),
    "parts": (
        '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}',
        "content: Input should be",
    ),
    "unknown role": (json.dumps(turns("a", "b")).replace("user", "judge"), "line 2: the chat template"),
    "system": ('{"messages": [{"role": "system", "content": "a"}]}', "says: System role not supported. Correct the"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_line_is_named(tmp_path, case):
    text, problem = WRONG[case]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [USER, ANSWER]}) + "\n" + text)
    write_tokenizer(tmp_path / "t", GEMMA)
    with pytest.raises(DataError) as error:
        load(tmp_path / "a.jsonl", tmp_path / "t")
    assert problem in str(error.value) and str(error.value).startswith(f"{tmp_path}/a.jsonl: line 2: ")


def test_wrong_files_are_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match=r"data.path=.*a.jsonl: no conversation"):
        load(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match=r"data.path=.*no file in this directory ends in .jsonl"):
        load(write_tokenizer(tmp_path / "t"))
    write_lines(tmp_path / "a.jsonl", turns("a", "b"))
    with pytest.raises(ConfigError, match=r"data.tokenizer=bytes has no chat template"):
        load(tmp_path / "a.jsonl")
    write_tokenizer(tmp_path / "t", CHATML)
    with pytest.raises(DataError, match=r"line 1: token 2\d\d is not below model.vocab=267"):
        load(tmp_path / "a.jsonl", tmp_path / "t", vocab=267)


def test_special_tokens_in_a_text_are_read_as_transformers_reads_them(tmp_path):
    """The vocabulary may have the special tokens of masked rows too, whose names are plain text elsewhere."""
    directory = write_tokenizer(tmp_path / "t", CHATML)
    made = json.loads((directory / "tokenizer.json").read_text())
    row = ["[CLS]", "[SEP]", "[MASK]", "[PAD]"]
    added = [made["added_tokens"][0] | {"id": VOCAB + i, "content": token} for i, token in enumerate(row)]
    (directory / "tokenizer.json").write_text(json.dumps(made | {"added_tokens": [*made["added_tokens"], *added]}))
    path = write_lines(tmp_path / "a.jsonl", turns("[MASK]", "b"))
    ((ids, learned),) = conversations(load(path, directory, vocab=VOCAB + 4).train)
    assert ids.count(VOCAB + 2) == 1 and np.isin([*learned], ids).all() and len(learned) == 2
