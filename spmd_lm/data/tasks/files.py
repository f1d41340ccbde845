"""Reads labelled examples from the files in which their tasks are published.

task   in directories  a file
mnli   .tsv            GLUE's, header: sentence1, sentence2, gold_label; skipped where gold_label is '-' (no majority)
qqp    .tsv            GLUE's, header: question1, question2, is_duplicate
sst2   .tsv            GLUE's, header: sentence, label
cola   .tsv            no header: source, label, mark, sentence
race   .txt .jsonl     an article: {"article", "questions", "options", "answers"}; one per line in .jsonl
squad  .json           {"data": [{"paragraphs": [{"context", "qas": [{"question", "answers", "is_impossible"}]}]}]}
jsonl  .jsonl          {"text", "pair", "label"} per line; `pair` is optional, labels are 0, 1, ..

GLUE's files have no quoting: tabs separate columns, a `"` is text.  Classes are numbered as in Hugging Face's."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

from spmd_lm.data.tasks.examples import Answer, ClassificationExample, Example, MultipleChoiceExample, SquadExample
from spmd_lm.data.tasks.json_node import JsonNode
from spmd_lm.data.text_files import Document, read_documents
from spmd_lm.errors import DataError


def read_examples(task: str, patterns: list[str], key: str) -> tuple[list[Example], int]:
    """The examples of files, globs and directories, in order; and how many lines were skipped on purpose.

    key: the configuration key that holds `patterns`.  Raises DataError for missing, unreadable or malformed files."""
    file_format = FORMATS[task]
    examples: list[Example] = []
    skipped = 0
    for document in read_documents(patterns, key, file_format.suffixes):
        for example in file_format.parse(document):
            if example is None:
                skipped += 1
            else:
                examples.append(example)
    if not examples:
        lines = f" (lines skipped: {skipped:,})" if skipped else ""
        raise DataError(f"{key}={', '.join(patterns)}: no {task} examples{lines}. Name files that contain some.")
    return examples, skipped


def _text(document: Document) -> str:
    return document.text.decode("utf-8-sig")


def _lines(document: Document) -> Iterator[tuple[int, str]]:
    r"""Line numbers, from 1, and lines.  Only \n and \r\n end a line: other separators are text."""
    for number, line in enumerate(_text(document).removesuffix("\n").split("\n"), start=1):
        yield number, line.removesuffix("\r")


# --- TSV: GLUE --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Tsv:
    """Which columns of a TSV file hold an example's texts and label."""

    text: str
    text_pair: str | None
    label: str
    classes: tuple[str, ...]
    columns: tuple[str, ...] = ()  # empty: the first line is a header
    unlabelled: str | None = None  # the label of lines to skip
    skip_malformed: bool = False  # skip lines with a wrong number of columns; otherwise an error

    def parse(self, document: Document) -> Iterator[ClassificationExample | None]:
        """Examples; None for a line that is skipped."""
        lines = _lines(document)
        columns = self.columns or self._header(next(lines)[1], document)
        for number, line in lines:
            location = f"{document.path}: line {number}"
            values = line.split("\t")
            if len(values) == len(columns):
                yield self._example(dict(zip(columns, values, strict=True)), location)
            elif self.skip_malformed:
                yield None
            else:
                plural = "" if len(values) == 1 else "s"
                raise DataError(
                    f"{location}: {len(values)} column{plural}, not {len(columns)} ({_abbreviated(columns)}). "
                    "Fix the line: tabs separate columns, and texts contain none."
                )

    def _header(self, line: str, document: Document) -> tuple[str, ...]:
        columns = tuple(line.split("\t"))
        required = [name for name in (self.text, self.text_pair, self.label) if name]
        missing = [name for name in required if name not in columns]
        if missing:
            raise DataError(
                f"{document.path}: line 1: the header lacks {' and '.join(missing)} (it is: {_abbreviated(columns)}). "
                f"Name a file whose first line has the tab-separated columns {', '.join(required)}."
            )
        return columns

    def _example(self, row: dict[str, str], location: str) -> ClassificationExample | None:
        label = row[self.label]
        if label == self.unlabelled:
            return None
        if label not in self.classes:
            raise DataError(
                f"{location}: {self.label} is {label!r:.40}, not one of {', '.join(self.classes)}. "
                "Fix it, or remove the line."
            )
        text_pair = row[self.text_pair] if self.text_pair else None
        return ClassificationExample(location, row[self.text], text_pair, self.classes.index(label))


def _abbreviated(columns: tuple[str, ...]) -> str:
    """Column names for a message.  The first line of a file of another kind may be of any length."""
    names = ", ".join(columns)
    return names if len(names) <= 120 else f"{names[:120]}.."


# --- JSON: RACE, SQuAD, one's own -------------------------------------------------------------------------------------


def _json_lines(document: Document, schema: str) -> Iterator[JsonNode]:
    """One value per line; blank lines are ignored."""
    return (JsonNode.parse(line, document, schema, number) for number, line in _lines(document) if line.strip())


OPTION_LETTERS = ("A", "B", "C", "D")
RACE_SCHEMA = "An article is an object with `article`, `questions`, `options` and `answers`."
SQUAD_SCHEMA = "A SQuAD file is data[].paragraphs[] with `context` and qas[], and qas[] with `question` and answers[]."
JSONL_SCHEMA = 'A line is {"text": "..", "pair": "..", "label": 0}; `pair` is optional.'


def _parse_race(document: Document) -> Iterator[MultipleChoiceExample]:
    if document.path.suffix == ".jsonl":
        articles = _json_lines(document, RACE_SCHEMA)
    else:
        articles = iter([JsonNode.parse(_text(document), document, RACE_SCHEMA)])
    for article in articles:
        text = article["article"].to(str)
        questions, options, answers = (article[key].elements() for key in ("questions", "options", "answers"))
        if not len(questions) == len(options) == len(answers):
            raise article.error(
                f"{len(questions)} questions, {len(options)} lists of options, {len(answers)} answers",
                "Each question needs one list of options and one answer.",
            )
        for question, choices, answer in zip(questions, options, answers, strict=True):
            texts = tuple(_fill_blank(question.to(str), choice.to(str)) for choice in choices.elements())
            if len(texts) != len(OPTION_LETTERS):
                raise choices.error(f"expected {len(OPTION_LETTERS)} options, got {len(texts)}")
            letter = answer.to(str)
            if letter not in OPTION_LETTERS:
                raise answer.error(f"{letter!r:.40} is not one of {', '.join(OPTION_LETTERS)}", "Use one of them.")
            yield MultipleChoiceExample(question.location, text, texts, OPTION_LETTERS.index(letter))


def _fill_blank(question: str, option: str) -> str:
    """The question with `option` in place of its blank, `_`; without a blank, the option follows the question.

    White space is collapsed.  This is how RACE is usually prepared; WordPiece vocabularies ignore repeated spaces."""
    text = question.replace("_", option) if "_" in question else f"{question} {option}"
    return " ".join(text.split())


def _parse_squad(document: Document) -> Iterator[SquadExample]:
    root = JsonNode.parse(_text(document), document, SQUAD_SCHEMA)
    for article in root["data"].elements():
        for paragraph in article["paragraphs"].elements():
            context = paragraph["context"].to(str)
            for entry in paragraph["qas"].elements():
                yield _squad_example(entry, context)


def _squad_example(entry: JsonNode, context: str) -> SquadExample:
    answers = tuple(_answer(answer, context) for answer in entry["answers"].elements())
    is_impossible = entry["is_impossible"].to(bool) if entry.has("is_impossible") else None
    if is_impossible and answers:
        raise entry.error("is_impossible is true, but there is an answer", "Remove one of the two.")
    if not is_impossible and not answers:
        raise entry.error("no answer", "Add one, set is_impossible, or remove the question.")
    return SquadExample(entry.location, entry["question"].to(str), context, answers, is_impossible)


def _answer(entry: JsonNode, context: str) -> Answer:
    text, start = entry["text"].to(str), entry["answer_start"].to(int)
    if not text.strip():
        raise entry.error("the answer is empty", "Fill it in, or remove it.")
    if start < 0 or context[start : start + len(text)] != text:
        found = context.find(text)
        fix = "Remove the answer." if found < 0 else f"Use answer_start={found}."
        raise entry.error(f"the context does not have {text!r:.60} at answer_start={start}", fix)
    return Answer(text, start)


def _parse_jsonl(document: Document) -> Iterator[ClassificationExample]:
    for line in _json_lines(document, JSONL_SCHEMA):
        label = line["label"].to(int)
        if not 0 <= label < 2**31:
            raise line["label"].error(f"{label} is not a class", "Classes are numbered 0, 1, and so on.")
        text = line["text"].to(str)
        text_pair = line["pair"].to(str) if line.has("pair") else None
        yield ClassificationExample(line.location, text, text_pair, label)


# --- all tasks --------------------------------------------------------------------------------------------------------


class FileFormat(NamedTuple):
    suffixes: tuple[str, ...]  # of the files to read in a directory
    parse: Callable[[Document], Iterator[Example | None]]


MNLI_CLASSES = ("entailment", "neutral", "contradiction")
COLA_COLUMNS = ("source", "label", "mark", "sentence")
FORMATS = {
    "mnli": FileFormat((".tsv",), Tsv("sentence1", "sentence2", "gold_label", MNLI_CLASSES, unlabelled="-").parse),
    # The published train.tsv has line breaks inside some questions.
    "qqp": FileFormat((".tsv",), Tsv("question1", "question2", "is_duplicate", ("0", "1"), skip_malformed=True).parse),
    "sst2": FileFormat((".tsv",), Tsv("sentence", None, "label", ("0", "1")).parse),
    "cola": FileFormat((".tsv",), Tsv("sentence", None, "label", ("0", "1"), columns=COLA_COLUMNS).parse),
    "race": FileFormat((".txt", ".jsonl"), _parse_race),
    "squad": FileFormat((".json",), _parse_squad),
    "jsonl": FileFormat((".jsonl",), _parse_jsonl),
}
