"""Reading task files: small ones written here, and published ones where SPMD_LM_DATA has them."""

import json
from collections import Counter
from pathlib import Path

import pytest

from spmd_lm.data.tasks.files import Example, Question, SquadAnswer, read_examples
from spmd_lm.errors import DataError
from tests.published import published


def examples(task: str, *paths: Path, key: str = "data.path") -> list:
    found, skipped = read_examples(task, [str(path) for path in paths], key)
    assert skipped == 0
    return found


def texts(text: str, text_pair: str | None, label: int) -> tuple:
    """A classification example, less its location."""
    return Example("", [(text, text_pair)], label)[1:]


def lines(root: Path, *rows: str, name: str = "a.tsv", end: str = "\n") -> Path:
    (root / name).write_bytes("".join(row + end for row in rows).encode())
    return root / name


def as_json(root: Path, *trees: object, name: str) -> Path:
    return lines(root, *(json.dumps(tree) for tree in trees), name=name)


def error_of(task: str, path: Path) -> str:
    with pytest.raises(DataError) as error:
        read_examples(task, [str(path)], "data.validation_path")
    assert error.value.code == 4
    return str(error.value)


# --- columns ----------------------------------------------------------------------------------------------------------


def test_cola_as_published():
    train = examples("cola", published("cola_in_domain_train.tsv"))
    held_out = examples("cola", published("cola_in_domain_dev.tsv"))
    assert len(train) == 8551 and len(held_out) == 527
    assert Counter(each.label for each in train) == {1: 6023, 0: 2528}
    assert train[0][1:] == texts("Our friends won't buy this analysis, let alone the next one we propose.", None, 1)
    assert held_out[0].location.endswith("cola_in_domain_dev.tsv: line 1")


def test_sst2_as_published():
    found = examples("sst2", published("sst2_glue_train_part.tsv"))
    assert len(found) == 6735 and found[0][1:] == texts("the expressive power of the camera ", None, 1)
    assert {each.label for each in found} == {0, 1}


def test_mnli_as_published():
    path = published("mnli_dev_matched_raw_first.tsv")
    found = examples("mnli", path)
    assert len(found) == 51
    assert found[0] == Example(
        f"{path}: line 2", [("The new rights are nice enough", "Everyone really likes the newest benefits ")], 1
    )
    assert [each.label for each in found[:4]] == [1, 2, 0, 2]


def test_columns_are_found_by_name_and_quote_nothing(tmp_path):
    path = lines(
        tmp_path,
        "gold_label\tx\tsentence2\tsentence1",
        'neutral\t0\tb "\ta',
        '-\t1\td\t"c',
        "entailment\t\t\u2028f\t e",
    )
    found, skipped = read_examples("mnli", [str(path)], "data.path")
    assert found == [
        Example(f"{path}: line 2", [("a", 'b "')], 1),
        Example(f"{path}: line 4", [(" e", "\u2028f")], 0),
    ]
    assert skipped == 1


def test_crlf_line_ends_and_a_byte_order_mark_are_accepted(tmp_path):
    plain = examples("sst2", lines(tmp_path, "sentence\tlabel", "fine\t1"))
    marked = examples("sst2", lines(tmp_path, "\ufeffsentence\tlabel", "fine\t1", end="\r\n"))
    assert marked == plain == [Example(f"{tmp_path}/a.tsv: line 2", [("fine", None)], 1)]


def test_malformed_lines_of_qqp_are_skipped_and_counted(tmp_path):
    path = lines(
        tmp_path, "id\tquestion1\tquestion2\tis_duplicate", "0\ta?\tb?\t1", "1\tc", "d?\te?\t0", "2\tf?\tg?\t0"
    )
    found, skipped = read_examples("qqp", [str(path)], "data.path")
    assert [each[1:] for each in found] == [texts("a?", "b?", 1), texts("f?", "g?", 0)] and skipped == 2


def test_a_directory_is_searched_for_the_files_of_its_task(tmp_path):
    lines(tmp_path, "gj04\t0\t*\tb b", name="b.tsv")
    lines(tmp_path, "gj04\t1\t\ta", name="a.tsv")
    lines(tmp_path, "no columns", name="readme.txt")
    assert [each[1:] for each in examples("cola", tmp_path)] == [texts("a", None, 1), texts("b b", None, 0)]
    assert (
        "data.validation_path=" in (message := error_of("squad", tmp_path)) and message.count(" ends in .json. ") == 1
    )


@pytest.mark.parametrize(
    ("task", "rows", "message"),
    [
        (
            "mnli",
            ["sentence1\tsentence2", "a\tb"],
            "line 1: the header lacks gold_label (it is: sentence1, sentence2). Name a file whose first line has the "
            "tab-separated columns sentence1, sentence2, gold_label.",
        ),
        (
            "sst2",
            ["fine\t1"],
            "line 1: the header lacks sentence and label (it is: fine, 1). Name a file whose first line",
        ),
        (
            "sst2",
            ["sentence," * 99],
            f"line 1: the header lacks sentence and label (it is: {('sentence,' * 99)[:120]}..). Name a file",
        ),
        (
            "sst2",
            ["sentence\tlabel", "fine\t1", "bad"],
            "line 3: 1 column, not 2 (sentence, label). Fix the line: tabs separate columns, and texts contain none.",
        ),
        ("cola", ["gj04\t1\tfine"], "line 1: 3 columns, not 4 (source, label, mark, sentence). Fix the line"),
        (
            "cola",
            ["gj04\t1\t\ta", "gj04\t2\t\tb"],
            "line 2: label is '2', not one of 0, 1. Fix it, or remove the line.",
        ),
        (
            "mnli",
            ["sentence1\tsentence2\tgold_label", "a\tb\tyes"],
            "line 2: gold_label is 'yes', not one of entailment, neutral, contradiction. Fix it",
        ),
        (
            "qqp",
            ["question1\tquestion2\tis_duplicate", "a\tb\t-"],
            "line 2: is_duplicate is '-', not one of 0, 1. Fix it",
        ),
    ],
)
def test_malformed_columns(tmp_path, task, rows, message):
    path = lines(tmp_path, *rows)
    assert f"{path}: {message}" in error_of(task, path)


def test_files_without_examples(tmp_path):
    path = lines(tmp_path, "sentence\tlabel")
    assert error_of("sst2", path) == f"data.validation_path={path}: no sst2 examples. Name files that contain some."
    path = lines(tmp_path, "sentence1\tsentence2\tgold_label", "a\tb\t-")
    assert "no mnli examples (lines skipped: 1). Name" in error_of("mnli", path)
    assert f"data.validation_path={tmp_path}/b.tsv: the file is empty." in error_of(
        "sst2", lines(tmp_path, name="b.tsv")
    )


def test_missing_files_and_files_not_in_utf8_name_the_key(tmp_path):
    assert f"data.validation_path={tmp_path}/no.tsv: no such file" in error_of("cola", tmp_path / "no.tsv")
    assert f"data.validation_path={tmp_path}/*.tsv: matches no file" in error_of("cola", tmp_path / "*.tsv")
    (tmp_path / "a.tsv").write_bytes("gj04\t1\t\tcaf\xe9 au lait".encode("latin1"))
    message = error_of("cola", tmp_path)
    assert f"{tmp_path}/a.tsv: not UTF-8: byte 0xe9 at offset 11. Re-encode it" in message
    assert message.endswith("or leave it out of data.validation_path.")


# --- RACE -------------------------------------------------------------------------------------------------------------

ARTICLE = {
    "article": "It rained. Ann stayed in.",
    "questions": ["Ann went   _  .", "Who stayed in?"],
    "options": [["nowhere", "out", "home", "by bus"], ["Ann", "Bob", "Eve", "Mallory"]],
    "answers": ["A", "D"],
    "id": "high1.txt",
}


def test_race_as_published():
    found = examples("race", published("race_dev_middle.jsonl"))
    assert len(found) == 1436 and len({each.text_pairs[0][0] for each in found}) == 368
    first = found[0]
    assert first.label == 0 and first.text_pairs[2][1] == "When something reflects light, we can not see its color ."
    assert found[4].text_pairs[0][1] == "What's the best title of this passage( )? Dark color"
    assert {each.label for each in found} == {0, 1, 2, 3}


def test_an_option_fills_the_blank_or_follows_the_question(tmp_path):
    path = as_json(tmp_path, ARTICLE, name="a.jsonl")
    first, second = examples("race", path)
    options = ("Ann went nowhere .", "Ann went out .", "Ann went home .", "Ann went by bus .")
    assert first.text_pairs == [(ARTICLE["article"], option) for option in options]
    options = ("Who stayed in? Ann", "Who stayed in? Bob", "Who stayed in? Eve", "Who stayed in? Mallory")
    pairs = [(ARTICLE["article"], option) for option in options]
    assert second == Example(f"{path}: line 1: questions[1]", pairs, 3)


def test_one_article_per_file_reads_as_one_article_per_line(tmp_path):
    for level in ("high", "middle"):
        (tmp_path / "dev" / level).mkdir(parents=True)
        (tmp_path / "dev" / level / "1.txt").write_text(json.dumps({**ARTICLE, "article": level}, indent=1))
    path = as_json(tmp_path, {**ARTICLE, "article": "high"}, {**ARTICLE, "article": "middle"}, name="a.jsonl")
    apart = examples("race", tmp_path / "dev")
    assert [each[1:] for each in apart] == [each[1:] for each in examples("race", path)]
    assert apart[3].location == f"{tmp_path}/dev/middle/1.txt: questions[1]"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"answers": ["A"]},
            "line 2: 2 questions, 2 lists of options, 1 answers. An article is an object with `article`, "
            "`questions`, and as many `options` (lists of four) and `answers`.",
        ),
        ({"answers": ["A", "E"]}, "line 2: answers[1]: Input should be 'A', 'B', 'C' or 'D', got 'E'. An article"),
        ({"answers": ["A", ""]}, "line 2: answers[1]: Input should be 'A', 'B', 'C' or 'D', got ''"),
        (
            {"options": [["a"], list("abcd")]},
            "line 2: options[0]: List should have at least 4 items after validation, not 1, got ['a']. An",
        ),
        (
            {"options": [[1, 2, 3, 4]] * 2},
            "line 2: options[0][0]: Input should be a valid string, got 1. An article is an object with",
        ),
        ({"article": None}, "line 2: article: Input should be a valid string, got None. An article"),
        ({"questions": "Who?"}, "line 2: questions: Input should be a valid array, got 'Who?'. An article"),
        ({"article": "half \ud83d"}, "line 2: Invalid JSON: unexpected end of hex escape at column 25. An article"),
    ],
)
def test_malformed_articles(tmp_path, change, message):
    path = as_json(tmp_path, ARTICLE, {**ARTICLE, **change}, name="a.jsonl")
    assert f"{path}: {message}" in error_of("race", path)


# --- SQuAD ------------------------------------------------------------------------------------------------------------

CONTEXT = "Née in Łódź, Ann moved to Oslo."


def squad(root: Path, *entries: object, context: object = CONTEXT) -> Path:
    tree = {"version": "x", "data": [{"title": "t", "paragraphs": [{"context": context, "qas": [*entries]}]}]}
    (root / "a.json").write_text(json.dumps(tree, ensure_ascii=False, indent=1), "utf-8")
    return root / "a.json"


def asked(answers: list[tuple[str, int]], **more: object) -> dict:
    return {
        "id": "1", "question": "Where?", "answers": [{"text": t, "answer_start": s} for t, s in answers], **more
    }  # fmt: skip


def test_squad_versions_1_and_2(tmp_path):
    path = squad(tmp_path, asked([("Oslo", 26), ("to Oslo", 23)]))
    where = f"{path}: data[0].paragraphs[0].qas[0]"
    answers = [SquadAnswer(text="Oslo", answer_start=26), SquadAnswer(text="to Oslo", answer_start=23)]
    assert examples("squad", path) == [Example(where, [("Where?", CONTEXT)], 0, Question(CONTEXT, answers, None))]
    squad(tmp_path, asked([], is_impossible=True), asked([("Łódź", 7)], is_impossible=False))
    questions = [each.question for each in examples("squad", tmp_path)]
    assert [each.is_impossible for each in questions] == [True, False]
    assert questions[0].answers == [] and questions[1].answers == [SquadAnswer(text="Łódź", answer_start=7)]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            asked([("Oslo", 25)]),
            "answers[0]: the context does not have 'Oslo' at answer_start=25. Use answer_start=26",
        ),
        (
            asked([("Oslo", -5)]),
            "answers[0]: the context does not have 'Oslo' at answer_start=-5. Use answer_start=26",
        ),
        (
            asked([("Rome", 3)]),
            "answers[0]: the context does not have 'Rome' at answer_start=3. Remove the answer.",
        ),
        (asked([(" ", 3)]), "answers[0]: the answer is empty. Fill it in, or remove it."),
        (asked([]), "no answer. Add one, set is_impossible, or remove the question."),
        (asked([], is_impossible=False), "no answer. Add one"),
        (
            asked([("Oslo", 26)], is_impossible=True),
            "is_impossible is true, but there is an answer. Remove one of the two.",
        ),
        (
            asked([], is_impossible="yes"),
            "is_impossible: Input should be a valid boolean, got 'yes'. A SQuAD file is data[]",
        ),
        (asked([("Oslo", True)]), "answers[0].answer_start: Input should be a valid integer, got True. A SQuAD"),
        ({"question": "?"}, "answers: Field required. A SQuAD file is"),
        ("?", "Input should be an object, got '?'. A SQuAD file is"),
    ],
)
def test_malformed_questions(tmp_path, entry, message):
    path = squad(tmp_path, entry)
    separator = "." if message.startswith(("answers", "is_impossible:")) else ": "
    assert f"{path}: data[0].paragraphs[0].qas[0]{separator}{message}" in error_of("squad", path)


def test_malformed_json(tmp_path):
    (tmp_path / "a.json").write_text('{"data":\n [}')
    assert f"{tmp_path}/a.json: Invalid JSON: expected value at line 2 column 3. A SQuAD" in error_of("squad", tmp_path)
    (tmp_path / "a.json").write_text("[" * 100_000)
    assert f"{tmp_path}/a.json: Invalid JSON: recursion limit exceeded" in error_of("squad", tmp_path)
    (tmp_path / "a.json").write_text('{"data": {}}')
    assert f"{tmp_path}/a.json: data: Input should be a valid array, got {{}}." in error_of("squad", tmp_path)
    (tmp_path / "a.json").write_text("[]")
    assert f"{tmp_path}/a.json: Input should be an object, got []." in error_of("squad", tmp_path)
    path = lines(tmp_path, json.dumps(ARTICLE), "{'article': 1}", name="a.jsonl")
    assert f"{path}: line 2: Invalid JSON: key must be a string at column 2. An" in error_of("race", path)


# --- jsonl ------------------------------------------------------------------------------------------------------------


def test_json_lines(tmp_path):
    path = lines(tmp_path, '{"text": "a", "label": 4}', "", '{"pair": "c", "label": 0, "text": "b"}', name="a.jsonl")
    assert examples("jsonl", path) == [
        Example(f"{path}: line 1", [("a", None)], 4),
        Example(f"{path}: line 3", [("b", "c")], 0),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"text": "a"}, 'label: Field required. A line is {"text": ".."'),
        ({"label": 1}, "text: Field required."),
        ({"text": "a", "label": "1"}, "label: Input should be a valid integer, got '1'."),
        ({"text": "a", "label": True}, "label: Input should be a valid integer, got True."),
        ({"text": "a", "label": -1}, "label: Input should be greater than or equal to 0, got -1. A line is"),
        ({"text": "a", "label": 1, "pair": 2}, "pair: Input should be a valid string, got 2."),
        ([1], "Input should be an object, got [1]. A line is"),
    ],
)
def test_malformed_json_lines(tmp_path, line, message):
    path = as_json(tmp_path, {"text": "a", "label": 0}, line, name="a.jsonl")
    assert f"{path}: line 2: {message}" in error_of("jsonl", path)
