"""Reads labelled examples from files in the formats that tasks are published in.

task   suffixes        contents
mnli   .tsv            GLUE's, header: sentence1, sentence2, gold_label; skipped where gold_label is '-' (no majority)
qqp    .tsv            GLUE's, header: question1, question2, is_duplicate
sst2   .tsv            GLUE's, header: sentence, label
cola   .tsv            no header: source, label, mark, sentence
race   .txt .jsonl     an article: {"article", "questions", "options", "answers"}; one per line in .jsonl
squad  .json           {"data": [{"paragraphs": [{"context", "qas": [{"question", "answers", "is_impossible"}]}]}]}
jsonl  .jsonl          {"text", "pair", "label"} per line; `pair` is optional, labels are 0, 1, ..

GLUE's files have no quoting: tabs separate columns, and `"` is text.  Classes have Hugging Face's numbers."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, FailFast, Field, ValidationError, model_validator

from spmd_lm.data.text_files import Document, read_documents
from spmd_lm.errors import DataError
from spmd_lm.files import require_few_values

Item = TypeVar("Item")
Items = Annotated[list[Item], FailFast()]  # one error for a list, not one per item
Schema = TypeVar("Schema", bound=BaseModel)  # error messages about a file or a line end with its schema's docstring


class SquadAnswer(BaseModel):
    text: str
    answer_start: int  # in characters of the context


class Question(NamedTuple):
    """The reference that a predicted answer is scored against."""

    context: str
    answers: list[SquadAnswer]  # one per annotator; empty if the context does not answer the question
    is_impossible: bool | None  # None if the file does not say, as in SQuAD 1.1


class Example(NamedTuple):
    """A labelled example, before tokenization."""

    location: str  # file and line, for messages
    text_pairs: Sequence[
        tuple[str, str | None]
    ]  # a model reads one row of text per pair; the second text may be missing
    label: int  # the class, or the index of the correct pair; 0 for a question, whose labels differ between its windows
    question: Question | None = None


def read_examples(task: str, patterns: list[str], key: str) -> tuple[list[Example], int]:
    """The examples in files, globs and directories, in order, and the number of lines skipped on purpose.  Raises
    DataError for missing, unreadable or malformed files.  key: the configuration key that holds `patterns`."""
    suffixes, parse = FORMATS[task]
    entries = [entry for document in read_documents(patterns, key, suffixes) for entry in parse(document)]
    examples = [entry for entry in entries if entry is not None]
    skipped = len(entries) - len(examples)
    if not examples:
        lines = f" (lines skipped: {skipped:,})" if skipped else ""
        raise DataError(f"{key}={', '.join(patterns)}: no {task} examples{lines}. Name files that contain some.")
    return examples, skipped


def _lines(document: Document) -> Iterator[tuple[str, str]]:
    r"""The location of each line, and the line.  Only \n and \r\n end a line: other separators are text."""
    for number, line in enumerate(document.text.decode("utf-8-sig").removesuffix("\n").split("\n"), start=1):
        yield f"{document.path}: line {number}", line.removesuffix("\r")


@dataclasses.dataclass(frozen=True)
class Tsv:
    """The columns of a TSV file with an example's texts and label."""

    text: str
    text_pair: str | None
    label: str
    classes: tuple[str, ...]
    columns: tuple[str, ...] = ()  # empty: the first line is a header
    unlabelled: str | None = None  # the label of lines to skip
    skip_malformed: bool = False  # skip lines with a wrong number of columns; otherwise an error

    def parse(self, document: Document) -> Iterator[Example | None]:
        """Yields examples; None for a skipped line."""
        lines = _lines(document)
        columns = self.columns or self._header(*next(lines))
        for location, line in lines:
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

    def _header(self, location: str, line: str) -> Sequence[str]:
        columns = line.split("\t")
        required = [name for name in (self.text, self.text_pair, self.label) if name]
        if missing := [name for name in required if name not in columns]:
            raise DataError(
                f"{location}: the header lacks {' and '.join(missing)} (it is: {_abbreviated(columns)}). "
                f"Name a file whose first line has the tab-separated columns {', '.join(required)}."
            )
        return columns

    def _example(self, row: dict[str, str], location: str) -> Example | None:
        label = row[self.label]
        if label == self.unlabelled:
            return None
        if label not in self.classes:
            raise DataError(
                f"{location}: {self.label} is {label!r:.40}, not one of {', '.join(self.classes)}. "
                "Fix it, or remove the line."
            )
        text_pair = row[self.text_pair] if self.text_pair else None
        return Example(location, [(row[self.text], text_pair)], self.classes.index(label))


def _abbreviated(columns: Sequence[str]) -> str:
    """Column names for a message; the first line of another kind of file may be long."""
    names = ", ".join(columns)
    return names if len(names) <= 120 else f"{names[:120]}.."


class RaceArticle(BaseModel):
    """An article is an object with `article`, `questions`, and as many `options` (lists of four) and `answers`."""

    article: str
    questions: Items[str]
    options: Items[Annotated[list[str], Field(min_length=4, max_length=4)]]
    answers: Items[Literal["A", "B", "C", "D"]]

    @model_validator(mode="after")
    def _equally_many(self) -> "RaceArticle":
        counts = len(self.questions), len(self.options), len(self.answers)
        if len(set(counts)) > 1:
            raise ValueError("{} questions, {} lists of options, {} answers".format(*counts))
        return self


class SquadQuestion(BaseModel):
    question: str
    answers: Items[SquadAnswer]
    is_impossible: bool = False  # SQuAD 1.1 has no such key


class SquadParagraph(BaseModel):
    context: str
    qas: Items[SquadQuestion]


class SquadArticle(BaseModel):
    paragraphs: Items[SquadParagraph]


class SquadFile(BaseModel):
    """A SQuAD file is data[].paragraphs[] with `context` and qas[], and qas[] with `question` and answers[]."""

    data: Items[SquadArticle]


class LabelledText(BaseModel):
    """A line is {"text": "..", "pair": "..", "label": 0}; `pair` is optional, classes are numbered 0, 1, and so on."""

    text: str
    pair: str = ""
    label: Annotated[int, Field(ge=0, lt=2**31)]


def load_json(schema: type[Schema], document: Document, by_line: bool) -> Iterator[tuple[str, Schema]]:
    """Yields the location and value of each non-blank line, or of the whole document.  Raises DataError."""
    texts = _lines(document) if by_line else iter([(str(document.path), document.text.decode("utf-8-sig"))])
    for location, text in texts:
        if by_line and not text.strip():
            continue
        try:
            if by_line:
                require_few_values(text.encode())
            value = schema.model_validate_json(text, strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            keys = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in first["loc"]).removeprefix(".")
            problem = "Input should be an object" if first["type"] == "model_type" else first["msg"]
            problem = problem.removeprefix("Value error, ")
            if first["type"] == "json_invalid":
                problem = problem.replace("at line 1 column", "at column") if by_line else problem
            elif first["type"] not in ("missing", "value_error"):
                problem += f", got {first['input']!r:.40}"
            raise DataError(f"{location}: {f'{keys}: ' if keys else ''}{problem}. {schema.__doc__}") from None
        except ValueError as error:
            raise DataError(f"{location}: {error}. {schema.__doc__}") from None
        yield location, value


def fill_blank(question: str, option: str) -> str:
    """A RACE question with an option in its blank, or after it.  White space is collapsed: this is how RACE is usually
    prepared, and WordPiece vocabularies ignore repeated spaces."""
    question = question if "_" in question else f"{question} _"
    return " ".join(question.replace("_", option).split())


def _parse_race(document: Document) -> Iterator[Example]:
    for location, article in load_json(RaceArticle, document, by_line=document.path.suffix == ".jsonl"):
        questions = zip(article.questions, article.options, article.answers, strict=True)
        for i, (question, options, answer) in enumerate(questions):
            pairs = [(article.article, fill_blank(question, option)) for option in options]
            yield Example(f"{location}: questions[{i}]", pairs, "ABCD".index(answer))


def _parse_squad(document: Document) -> Iterator[Example]:
    [(path, file)] = load_json(SquadFile, document, by_line=False)
    for i, article in enumerate(file.data):
        for j, paragraph in enumerate(article.paragraphs):
            for k, entry in enumerate(paragraph.qas):
                location = f"{path}: data[{i}].paragraphs[{j}].qas[{k}]"
                _check_answers(entry, paragraph.context, location)
                is_impossible = entry.is_impossible if "is_impossible" in entry.model_fields_set else None
                question = Question(paragraph.context, entry.answers, is_impossible)
                yield Example(location, [(entry.question, paragraph.context)], 0, question)


def _check_answers(entry: SquadQuestion, context: str, location: str) -> None:
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


def _parse_jsonl(document: Document) -> Iterator[Example]:
    for location, line in load_json(LabelledText, document, by_line=True):
        text_pair = line.pair if "pair" in line.model_fields_set else None
        yield Example(location, [(line.text, text_pair)], line.label)


MNLI_CLASSES = ("entailment", "neutral", "contradiction")
COLA_COLUMNS = ("source", "label", "mark", "sentence")
FORMATS: dict[str, tuple[tuple[str, ...], Callable[[Document], Iterator[Example | None]]]] = {
    # task: file suffixes in a directory, and parser
    "mnli": ((".tsv",), Tsv("sentence1", "sentence2", "gold_label", MNLI_CLASSES, unlabelled="-").parse),
    # The published train.tsv has line breaks inside some questions.
    "qqp": ((".tsv",), Tsv("question1", "question2", "is_duplicate", ("0", "1"), skip_malformed=True).parse),
    "sst2": ((".tsv",), Tsv("sentence", None, "label", ("0", "1")).parse),
    "cola": ((".tsv",), Tsv("sentence", None, "label", ("0", "1"), columns=COLA_COLUMNS).parse),
    "race": ((".txt", ".jsonl"), _parse_race),
    "squad": ((".json",), _parse_squad),
    "jsonl": ((".jsonl",), _parse_jsonl),
}
