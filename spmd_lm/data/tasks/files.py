"""Labelled examples, out of the files in which their tasks are published.

task   in directories  a file
mnli   .tsv            GLUE's, with a header: sentence1, sentence2, gold_label; '-', where people disagreed, is left out
qqp    .tsv            GLUE's, with a header: question1, question2, is_duplicate
sst2   .tsv            GLUE's, with a header: sentence, label
cola   .tsv            without a header: source, label, mark, sentence
race   .txt .jsonl     an article: {"article", "questions", "options", "answers"}; in a .jsonl, one a line
squad  .json           {"data": [{"paragraphs": [{"context", "qas": [{"question", "answers", "is_impossible"}]}]}]}
jsonl  .jsonl          {"text", "pair", "label"} a line; the pair may be missing, labels are 0, 1, ..

GLUE's files quote nothing: a tab parts columns, a `"` is text.  Classes are numbered as Hugging Face does."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from spmd_lm.data.text_files import Document, read_documents
from spmd_lm.errors import DataError

LETTERS = "ABCD"  # of RACE's options

T = TypeVar("T")


class Pair(NamedTuple):
    """Of which class a text is, or two."""

    where: str
    first: str
    second: str | None
    label: int

    @property
    def pairs(self) -> list[tuple[str, str | None]]:
        return [(self.first, self.second)]


class Choice(NamedTuple):
    """Which of several options an article bears out."""

    where: str
    article: str
    options: tuple[str, ...]  # each with the question
    label: int

    @property
    def pairs(self) -> list[tuple[str, str | None]]:
        return [(self.article, option) for option in self.options]


class Answer(NamedTuple):
    text: str
    start: int  # where it stands in its context, in characters


class Question(NamedTuple):
    """Where its answer stands in a context."""

    where: str
    question: str
    context: str
    answers: tuple[Answer, ...]  # as several people gave them; none, if there is none
    impossible: bool | None  # as the file says it; None where it does not, as of SQuAD 1.1

    @property
    def pairs(self) -> list[tuple[str, str | None]]:
        return [(self.question, self.context)]

    @property
    def label(self) -> int:
        return 0


Example = Pair | Choice | Question


def read(task: str, patterns: list[str], key: str) -> tuple[list[Example], int]:
    """The examples of files, globs and directories, in order; and of how many lines there is none, on purpose.

    key: where in the configuration `patterns` stand.  Raises DataError for what is missing, unreadable or malformed."""
    suffixes, reader = READERS[task]
    found = [each for document in read_documents(patterns, key, suffixes) for each in reader(document)]
    examples = [each for each in found if each is not None]
    left_out = len(found) - len(examples)
    if not examples:
        why = f", {left_out:,} of whose lines are left out" if left_out else ""
        raise DataError(f"{key}={', '.join(patterns)}: no example of {task}{why}. Name files that have some.")
    return examples, left_out


def _lines(document: Document) -> Iterator[tuple[int, str]]:
    """Lines and their numbers.  Other ends of lines than these are text."""
    text = document.text.decode("utf-8-sig").removesuffix("\n")
    for number, line in enumerate(text.split("\n"), start=1):
        yield number, line.removesuffix("\r")


# --- columns ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Columns:
    """A file of lines with columns, under a header unless `names` say what they are."""

    first: str
    second: str | None
    label: str
    classes: tuple[str, ...]
    names: tuple[str, ...] = ()
    undecided: str | None = None  # the label of lines that are left out
    torn: bool = False  # whether lines with another number of columns are, too

    def __call__(self, document: Document) -> Iterator[Pair | None]:
        """None for a line that is left out."""
        lines, names = _lines(document), self.names
        if not names:
            names = tuple(next(lines)[1].split("\t"))
            self._check_header(names, document)
        for number, line in lines:
            where, columns = f"{document.path}: line {number}", line.split("\t")
            if len(columns) == len(names):
                yield self._pair(dict(zip(names, columns, strict=True)), where)
            elif self.torn:
                yield None
            else:
                raise DataError(
                    f"{where}: {len(columns)} column{'s'[len(columns) == 1 :]}, not {len(names)} ({_several(names)}). "
                    "Mend the line: a tab parts columns, and no text has one."
                )

    def _check_header(self, names: tuple[str, ...], document: Document) -> None:
        asked = [name for name in (self.first, self.second, self.label) if name]
        if missing := [name for name in asked if name not in names]:
            raise DataError(
                f"{document.path}: line 1: a header without {' and '.join(missing)}, of {_several(names)}. "
                f"Name a file whose first line has {', '.join(asked)}, parted by tabs."
            )

    def _pair(self, row: dict[str, str], where: str) -> Pair | None:
        label = row[self.label]
        if label == self.undecided:
            return None
        if label not in self.classes:
            raise DataError(
                f"{where}: {self.label} is {label!r:.40}, not one of {', '.join(self.classes)}. "
                "Mend it, or leave the line out."
            )
        return Pair(where, row[self.first], row[self.second] if self.second else None, self.classes.index(label))


def _several(names: tuple[str, ...]) -> str:
    """Names of columns, cut short: a file of another kind may have any."""
    shown = ", ".join(names)
    return shown if len(shown) <= 120 else f"{shown[:120]}.."


# --- JSON -------------------------------------------------------------------------------------------------------------

KINDS = {str: "a string", int: "a whole number", bool: "true or false", list: "a list", dict: "an object"}


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """A value in a JSON file, which knows where it stands."""

    value: Any
    file: str  # and the line, if a line is a value
    place: str
    form: str  # what the value of the file should be

    @classmethod
    def of(cls, text: str, document: Document, form: str, line: int | None = None) -> "Node":
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            at = (line or 1) + getattr(error, "lineno", 1) - 1
            column = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
            raise DataError(
                f"{document.path}: line {at}: not JSON: {getattr(error, 'msg', error)}{column}. {form}"
            ) from None
        return cls(value, f"{document.path}: line {line}" if line else f"{document.path}", "", form)

    @property
    def where(self) -> str:
        return f"{self.file}: {self.place}" if self.place else self.file

    def wrong(self, what: str, mend: str = "") -> DataError:
        return DataError(f"{self.where}: {what}. {mend or self.form}")

    def to(self, kind: type[T]) -> T:
        """The value, which is of this kind; a string, one that has a UTF-8."""
        if type(self.value) is not kind:
            raise self.wrong(f"expected {KINDS[kind]}, got {self.value!r:.40}")
        if isinstance(self.value, str):
            try:
                self.value.encode()
            except UnicodeEncodeError as error:
                raise self.wrong(f"half a character, {self.value[error.start]!r}", "Write it whole.") from None
        return self.value

    def has(self, key: str) -> bool:
        return key in self.to(dict)

    def __getitem__(self, key: str) -> "Node":
        if not self.has(key):
            raise self.wrong(f"no {key!r}")
        return Node(self.value[key], self.file, f"{self.place}.{key}".removeprefix("."), self.form)

    def each(self) -> "list[Node]":
        values = self.to(list)
        return [Node(value, self.file, f"{self.place}[{i}]", self.form) for i, value in enumerate(values)]


def _one_a_line(document: Document, form: str) -> Iterator[Node]:
    """Blank lines are no values."""
    return (Node.of(line, document, form, number) for number, line in _lines(document) if line.strip())


def _race(document: Document) -> Iterator[Choice]:
    form = "An article is an object of `article`, `questions`, `options` and `answers`."
    if document.path.suffix == ".jsonl":
        articles = _one_a_line(document, form)
    else:
        articles = iter([Node.of(document.text.decode("utf-8-sig"), document, form)])
    for article in articles:
        text = article["article"].to(str)
        questions, options, answers = (article[key].each() for key in ("questions", "options", "answers"))
        if not len(questions) == len(options) == len(answers):
            raise article.wrong(
                f"{len(questions)} questions, {len(options)} lists of options, {len(answers)} answers",
                "Give each question one of both.",
            )
        for question, several, answer in zip(questions, options, answers, strict=True):
            choices = [_filled_in(question.to(str), option.to(str)) for option in several.each()]
            if len(choices) != len(LETTERS):
                raise several.wrong(f"{len(choices)} options, not {len(LETTERS)}", "Give as many.")
            if (letter := answer.to(str)) not in tuple(LETTERS):
                raise answer.wrong(f"{letter!r:.40} is not one of {', '.join(LETTERS)}", "Mend it.")
            yield Choice(question.where, text, tuple(choices), LETTERS.index(letter))


def _filled_in(question: str, option: str) -> str:
    """The option in place of the question's blank, `_`; after the question, if it has none.  So do others who train on
    RACE, whose vocabularies see one space where there are several."""
    text = question.replace("_", option) if "_" in question else f"{question} {option}"
    return " ".join(text.split())


def _squad(document: Document) -> Iterator[Question]:
    form = "SQuAD's files are data[].paragraphs[], of `context` and qas[], of `question` and answers[]."
    root = Node.of(document.text.decode("utf-8-sig"), document, form)
    for article in root["data"].each():
        for paragraph in article["paragraphs"].each():
            context = paragraph["context"].to(str)
            for entry in paragraph["qas"].each():
                yield _question(entry, context)


def _question(entry: Node, context: str) -> Question:
    answers = tuple(_answer(each, context) for each in entry["answers"].each())
    impossible = entry["is_impossible"].to(bool) if entry.has("is_impossible") else None
    if impossible and answers:
        raise entry.wrong("an answer to a question that is_impossible", "Remove one of the two.")
    if not impossible and not answers:
        raise entry.wrong("no answer", "Give one, set is_impossible, or leave the question out.")
    return Question(entry.where, entry["question"].to(str), context, answers, impossible)


def _answer(entry: Node, context: str) -> Answer:
    text, start = entry["text"].to(str), entry["answer_start"].to(int)
    if not text.strip():
        raise entry.wrong("the answer is empty", "Give another, or leave it out.")
    if start < 0 or context[start : start + len(text)] != text:
        found = context.find(text)
        mend = "Leave the answer out." if found < 0 else f"Use answer_start={found}."
        raise entry.wrong(f"{text!r:.60} is not what the context has at answer_start={start}", mend)
    return Answer(text, start)


def _labelled_lines(document: Document) -> Iterator[Pair]:
    form = 'A line is {"text": "..", "pair": "..", "label": 0}, where the pair may be missing.'
    for line in _one_a_line(document, form):
        if not 0 <= (label := line["label"].to(int)) < 2**31:
            raise line["label"].wrong(f"{label} is no class", "Classes are 0, 1, and so on.")
        yield Pair(line.where, line["text"].to(str), line["pair"].to(str) if line.has("pair") else None, label)


READERS: dict[str, tuple[tuple[str, ...], Callable[[Document], Iterator[Example | None]]]] = {
    "mnli": (
        (".tsv",),
        Columns("sentence1", "sentence2", "gold_label", ("entailment", "neutral", "contradiction"), undecided="-"),
    ),
    # The train.tsv that is published has line ends within some questions.
    "qqp": ((".tsv",), Columns("question1", "question2", "is_duplicate", ("0", "1"), torn=True)),
    "sst2": ((".tsv",), Columns("sentence", None, "label", ("0", "1"))),
    "cola": ((".tsv",), Columns("sentence", None, "label", ("0", "1"), names=("source", "label", "mark", "sentence"))),
    "race": ((".txt", ".jsonl"), _race),
    "squad": ((".json",), _squad),
    "jsonl": ((".jsonl",), _labelled_lines),
}
