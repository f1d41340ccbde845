"""The keys of a run's `data:`, one section for each source of data."""

import math
from typing import Annotated, Literal

from pydantic import Field
from pydantic.types import PositiveFloat

from spmd_lm.config.section import Section
from spmd_lm.config.types import Count, OwnModule, ValidPath


class Data(Section):
    source: str  # declared here, so that it is written before the other keys
    # bytes; bpe or wordpiece, which is trained on the training documents and has model.vocab tokens; or the path of a
    # vocabulary: data/tokenizers/vocabulary.py
    tokenizer: ValidPath = "bytes"
    # the token that begins a text precedes every document, context and prompt; auto: as in the vocabulary's own files
    bos: Literal["auto"] | bool = "auto"
    allow_change: bool = False  # resume a run whose data is no longer what its newest checkpoint was trained on


TRAINED_TOKENIZERS = ("bpe", "wordpiece")  # values of data.tokenizer that the run trains itself


RULES = 2
"""Version of the rules that turn documents into tokens.  A run keeps the version it began with: under 1, files are held
out by their names, and no token precedes a document."""


class Documents(Data):
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1  # of the text, whatever the sizes of its documents


def _as_list(paths: str | list[str]) -> list[str]:
    return [paths] if isinstance(paths, str) else paths


class PythonStdlib(Documents):
    """The standard library's source files: text that every machine with Python has."""

    source: Literal["python-stdlib"]


class Text(Documents):
    """UTF-8 files: paths, globs or directories, relative to the working directory."""

    source: Literal["text"]
    path: str | list[str]

    @property
    def paths(self) -> list[str]:
        return _as_list(self.path)


class BlendPart(Section):
    path: ValidPath  # of a data set
    weight: PositiveFloat  # its share of the samples is this over the sum of all weights


class Tokens(Data):
    """Token ids on disk: a directory of `spmd-lm prepare`, or Megatron-LM's .bin and .idx without their suffixes."""

    source: Literal["tokens"]
    # default: that of a prepared data set, or of the first of a blend; else bytes
    tokenizer: ValidPath = "bytes"
    path: ValidPath | None = None  # of one data set
    blend: Annotated[list[BlendPart], Field(min_length=1, max_length=1000)] | None = None  # in place of path
    pack: bool = False  # tokens attend within their document only, whose positions begin at 0
    # compares files with their checksums: each MiB before its first use (touch), all at the start (full), never (off)
    verify: Literal["touch", "full", "off"] = "touch"
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1  # of Megatron-LM's tokens, the last ones


class Task(Data):
    """Labelled examples in a task's own files; `data/tasks/files.py` describes their formats."""

    source: Literal["task"]
    task: Literal["mnli", "qqp", "sst2", "cola", "race", "squad", "jsonl"]
    path: str | list[str]  # training examples; files, globs or directories
    validation_path: str | list[str]  # validation examples, all used

    @property
    def paths(self) -> list[str]:
        return _as_list(self.path)

    @property
    def validation_paths(self) -> list[str]:
        return _as_list(self.validation_path)


class Instructions(Data):
    """Conversations, or prompts with their completions, in .jsonl files; a model trains on the answers alone."""

    source: Literal["instructions"]
    path: str | list[str]  # training conversations; files, globs or directories
    validation_path: str | list[str] | None = None  # validation conversations
    # rows hold several conversations, which attend only to themselves; false: one conversation per row
    pack: bool = True
    chat_template: ValidPath | None = None  # a Jinja file that makes a text of messages; default: the tokenizer's own

    @property
    def paths(self) -> list[str]:
        return _as_list(self.path)

    @property
    def validation_paths(self) -> list[str]:
        return _as_list(self.validation_path or [])


class Synthetic(Section):
    """A Markov chain whose entropy per token is known: each token has `branching` equally likely successors."""

    source: Literal["synthetic"]
    branching: Count = 4  # successors of a token
    allow_change: bool = False  # resume a run whose data is no longer what its newest checkpoint was trained on

    @property
    def entropy(self) -> float:
        """Nats per token: the lowest expected loss."""
        return math.log(self.branching)


class CustomData(Data):
    """A user-defined function."""

    source: Literal["custom"]
    # path.py:Name, a pure function: sample n as model.context + 1 token ids, or as fields of a row; docs/own-model.md
    module: OwnModule
    validation_samples: Count = 1024  # the first ones; training takes the rest


def packs_documents(data: Data | Synthetic) -> bool:
    return isinstance(data, Tokens | Instructions) and data.pack
