"""Labelled examples, before tokenization.

Each kind lists its text pairs: a model reads one row of text per pair, and a pair may lack its second text."""

from typing import NamedTuple

TextPair = tuple[str, str | None]


class ClassificationExample(NamedTuple):
    """One text, or two, and its class."""

    location: str  # file and line, for error messages
    text: str
    text_pair: str | None
    label: int

    @property
    def text_pairs(self) -> list[TextPair]:
        return [(self.text, self.text_pair)]


class MultipleChoiceExample(NamedTuple):
    """An article, and options of which it supports one."""

    location: str
    article: str
    options: tuple[str, ...]  # each combined with the question
    label: int  # index of the correct option

    @property
    def text_pairs(self) -> list[TextPair]:
        return [(self.article, option) for option in self.options]


class Answer(NamedTuple):
    text: str
    start: int  # in characters of the context


class SquadExample(NamedTuple):
    """A question, and its answers: spans of a context."""

    location: str
    question: str
    context: str
    answers: tuple[Answer, ...]  # one per annotator; empty if the context does not answer the question
    is_impossible: bool | None  # None if the file does not say, as in SQuAD 1.1

    @property
    def text_pairs(self) -> list[TextPair]:
        return [(self.question, self.context)]

    @property
    def label(self) -> int:
        return 0  # no class: its labels are token positions, which differ between windows of the context


Example = ClassificationExample | MultipleChoiceExample | SquadExample
