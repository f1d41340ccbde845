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
from typing import Annotated, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, Field, ValidationError, model_validator

from spmd_lm.data.tasks.examples import Answer, ClassificationExample, Example, MultipleChoiceExample, SquadExample
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

Schema = TypeVar("Schema", bound=BaseModel)  # error messages about a file or a line end with its schema's docstring


class RaceArticle(BaseModel):
    """An article is an object with `article`, `questions`, and as many `options` (lists of four) and `answers`."""

    article: str
    questions: list[str]
    options: list[Annotated[list[str], Field(min_length=4, max_length=4)]]
    answers: list[Literal["A", "B", "C", "D"]]

    @model_validator(mode="after")
    def _equally_many(self) -> "RaceArticle":
        counts = len(self.questions), len(self.options), len(self.answers)
        if len(set(counts)) > 1:
            raise ValueError("{} questions, {} lists of options, {} answers".format(*counts))
        return self


class SquadAnswer(BaseModel):
    text: str
    answer_start: int


class SquadQuestion(BaseModel):
    question: str
    answers: list[SquadAnswer]
    is_impossible: bool = False  # SQuAD 1.1 has no such key


class SquadParagraph(BaseModel):
    context: str
    qas: list[SquadQuestion]


class SquadArticle(BaseModel):
    paragraphs: list[SquadParagraph]


class SquadFile(BaseModel):
    """A SQuAD file is data[].paragraphs[] with `context` and qas[], and qas[] with `question` and answers[]."""

    data: list[SquadArticle]


class LabelledText(BaseModel):
    """A line is {"text": "..", "pair": "..", "label": 0}; `pair` is optional, classes are numbered 0, 1, and so on."""

    text: str
    pair: str = ""
    label: Annotated[int, Field(ge=0, lt=2**31)]


def _load_json(schema: type[Schema], text: str, document: Document, line: int | None = None) -> Schema:
    """Parses and validates a JSON text.  line: its line in the document, in JSON Lines."""
    try:
        return schema.model_validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
    location = f"{document.path}: line {line}" if line else str(document.path)
    keys = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in first["loc"]).removeprefix(".")
    location = f"{location}: {keys}" if keys else location
    problem = "Input should be an object" if first["type"] == "model_type" else first["msg"]
    problem = problem.removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        problem = problem.replace("at line 1 column", "at column") if line else problem
    elif first["type"] not in ("missing", "value_error"):
        problem += f", got {first['input']!r:.40}"
    raise DataError(f"{location}: {problem}. {schema.__doc__}")


def _load_json_lines(schema: type[Schema], document: Document) -> Iterator[tuple[str, Schema]]:
    """The location and value of each line that is not blank."""
    for number, line in _lines(document):
        if line.strip():
            yield f"{document.path}: line {number}", _load_json(schema, line, document, number)


def _parse_race(document: Document) -> Iterator[MultipleChoiceExample]:
    if document.path.suffix == ".jsonl":
        articles = _load_json_lines(RaceArticle, document)
    else:
        articles = iter([(str(document.path), _load_json(RaceArticle, _text(document), document))])
    for location, article in articles:
        questions = zip(article.questions, article.options, article.answers, strict=True)
        for i, (question, options, answer) in enumerate(questions):
            texts = tuple(_fill_blank(question, option) for option in options)
            yield MultipleChoiceExample(f"{location}: questions[{i}]", article.article, texts, "ABCD".index(answer))


def _fill_blank(question: str, option: str) -> str:
    """The question with `option` in place of its blank, `_`; without a blank, the option follows the question.

    White space is collapsed.  This is how RACE is usually prepared; WordPiece vocabularies ignore repeated spaces."""
    text = question.replace("_", option) if "_" in question else f"{question} {option}"
    return " ".join(text.split())


def _parse_squad(document: Document) -> Iterator[SquadExample]:
    file = _load_json(SquadFile, _text(document), document)
    for i, article in enumerate(file.data):
        for j, paragraph in enumerate(article.paragraphs):
            for k, entry in enumerate(paragraph.qas):
                location = f"{document.path}: data[{i}].paragraphs[{j}].qas[{k}]"
                answers = _answers(entry, paragraph.context, location)
                is_impossible = entry.is_impossible if "is_impossible" in entry.model_fields_set else None
                yield SquadExample(location, entry.question, paragraph.context, answers, is_impossible)


def _answers(entry: SquadQuestion, context: str, location: str) -> tuple[Answer, ...]:
    """A question's answers, checked against the context."""
    if entry.is_impossible and entry.answers:
        raise DataError(f"{location}: is_impossible is true, but there is an answer. Remove one of the two.")
    if not entry.is_impossible and not entry.answers:
        raise DataError(f"{location}: no answer. Add one, set is_impossible, or remove the question.")
    for i, answer in enumerate(entry.answers):
        text, start = answer.text, answer.answer_start
        if not text.strip():
            raise DataError(f"{location}.answers[{i}]: the answer is empty. Fill it in, or remove it.")
        if start < 0 or context[start : start + len(text)] != text:
            found = context.find(text)
            fix = "Remove the answer." if found < 0 else f"Use answer_start={found}."
            problem = f"the context does not have {text!r:.60} at answer_start={start}"
            raise DataError(f"{location}.answers[{i}]: {problem}. {fix}")
    return tuple(Answer(answer.text, answer.answer_start) for answer in entry.answers)


def _parse_jsonl(document: Document) -> Iterator[ClassificationExample]:
    for location, line in _load_json_lines(LabelledText, document):
        text_pair = line.pair if "pair" in line.model_fields_set else None
        yield ClassificationExample(location, line.text, text_pair, line.label)


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
