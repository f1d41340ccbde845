"""The keys of a run's `data:`, one section per source of data."""

import math
from typing import Annotated, Literal

from pydantic import Field
from pydantic.types import PositiveFloat

from spmd_lm.config.section import Section
from spmd_lm.config.types import Count, OwnModule, PathOrBucket, ValidPath


class Data(Section):
    source: str  # the kind of data; written before the other keys
    # bytes; bpe or wordpiece, trained on the training documents to model.vocab tokens; or the path of a vocabulary
    # (data/tokenizers/vocabulary.py)
    tokenizer: ValidPath = "bytes"
    # put the beginning-of-text token before every document, context and prompt; auto: if the vocabulary's files do
    bos: Literal["auto"] | bool = "auto"
    allow_change: bool = False  # resume even if the data has changed since the newest checkpoint


TRAINED_TOKENIZERS = ("bpe", "wordpiece")  # values of data.tokenizer that the run trains itself


RULES = 2
"""Version of the rules that turn documents into tokens.  A run keeps the version it began with: in 1, files are held
out for validation by name, and no token precedes a document."""


class Documents(Data):
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1  # share of the text, whatever its documents' sizes


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
    in_buckets = frozenset({"path"})

    path: PathOrBucket  # a data set
    weight: PositiveFloat  # share of the samples, relative to the sum of all weights


class Tokens(Data):
    """Token ids: a directory made by `spmd-lm prepare`, on disk or in a bucket, s3://BUCKET/KEY or gs://BUCKET/KEY; or
    Megatron-LM's .bin and .idx, without the suffix."""

    in_buckets = frozenset({"path"})

    source: Literal["tokens"]
    # default: the prepared data set's (of a blend, the first one's); else bytes
    tokenizer: ValidPath = "bytes"
    path: PathOrBucket | None = None  # a single data set
    blend: Annotated[list[BlendPart], Field(min_length=1, max_length=1000)] | None = None  # several, in place of path
    pack: bool = False  # tokens attend only within their document; its positions begin at 0
    # check files against their checksums: each MiB before first use (touch), all at the start (full), or never (off)
    verify: Literal["touch", "full", "off"] = "touch"
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1  # share of Megatron-LM's tokens, the last ones


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
    """Conversations, or prompts with their completions, in .jsonl files; only the answers are trained on."""

    source: Literal["instructions"]
    path: str | list[str]  # training conversations; files, globs or directories
    validation_path: str | list[str] | None = None  # validation conversations
    # rows hold several conversations, each attending only to itself; false: one conversation per row
    pack: bool = True
    chat_template: ValidPath | None = None  # a Jinja file that renders messages as text; default: the tokenizer's

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
    allow_change: bool = False  # resume even if the data has changed since the newest checkpoint

    @property
    def entropy(self) -> float:
        """Nats per token: the lowest expected loss."""
        return math.log(self.branching)


class CustomData(Data):
    """A user-defined function."""

    source: Literal["custom"]
    # path.py:Name, a pure function of n: sample n as model.context + 1 token ids, or a row's fields; docs/own-model.md
    module: OwnModule
    validation_samples: Count = 1024  # the first samples; training takes the rest


def packs_documents(data: Data | Synthetic) -> bool:
    return isinstance(data, Tokens | Instructions) and data.pack
