"""Keys of the YAML of `spmd-lm prepare`, with types, defaults and meanings.

sources: [articles.jsonl, {path: books/, per: file}]
out: data/articles
tokenizer: {train: bpe, vocab_size: 32000}
steps: {min_tokens: 128, exact_duplicates: true, near_duplicates: {jaccard: 0.7}}"""

import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from spmd_lm.config.data_sections import TRAINED_TOKENIZERS
from spmd_lm.config.section import Section
from spmd_lm.config.types import Count, CountOrZero, ValidPath

UNION_TAGS = ("<path>", "<train>")  # in pydantic's locations of errors in `tokenizer`


class Source(Section):
    """A source of documents.  Plain text in `sources` is a path."""

    # file, directory, glob, `-` for standard input, or `python-stdlib`: the sources of this Python's standard library
    path: ValidPath | None = None
    dataset: str | None = None  # instead of path: a Hugging Face data set's id or directory; needs `datasets`
    name: str | None = None  # the configuration of that data set
    split: str = "train"  # the split of that data set
    format: Literal["text", "jsonl", "parquet"] | None = None  # default: by the file's name; jsonl for standard input
    per: Literal["file", "line"] = "file"  # what makes one document in files of text
    text: str = "text"  # the key of a document's text, if documents have keys
    title: str = "title"  # the key of its title, for steps.leaks.titles

    @model_validator(mode="after")
    def check_origin(self) -> "Source":
        if (self.path is None) == (self.dataset is None):
            raise PydanticCustomError("origin", "expected one of path and dataset")
        return self

    @property
    def label(self) -> str:
        return self.path or str(self.dataset)


class TrainedTokenizer(Section):
    train: Literal["bpe", "wordpiece"]  # byte-level BPE as GPT-2's, or WordPiece as BERT's
    vocab_size: Annotated[int, Field(ge=300, le=2**20)]  # tokens, special ones included
    lowercase: bool = True  # for wordpiece alone
    sample_bytes: Count = 2**28  # bytes of training text, at most


class NearDuplicates(Section):
    jaccard: Annotated[float, Field(ge=0.3, lt=1)] = 0.7  # documents that are more similar count as one


class Leaks(Section):
    files: list[ValidPath] | None = None  # evaluation texts: all strings in JSON lines, all files of a directory
    ngram: Annotated[int, Field(ge=2, le=100)] = 13  # lower-case words in a row that no document may share with them
    titles: ValidPath | None = None  # file with titles of documents to remove, one per line

    @model_validator(mode="after")
    def check_given(self) -> "Leaks":
        if not self.files and not self.titles:
            raise PydanticCustomError("leaks", "expected files or titles, without which no text is looked for")
        return self


def switch(value: Any) -> Any:
    """Replaces `true` by all defaults, `false` by None."""
    return ({} if value else None) if isinstance(value, bool) else value


def hook(path: str) -> str:
    if not re.fullmatch(r"\w+(\.\w+)*:\w+", path):
        raise PydanticCustomError("hook", "expected module:function")
    return path


class CleaningSteps(Section):
    """Steps in the order in which they run; min_tokens comes last, when documents are tokenized."""

    utf8: Literal["repair", "refuse"] = "refuse"  # repair: by ftfy; refuse: invalid UTF-8 is bad input
    # module:function that takes a text and returns whether to use it; found on PYTHONPATH
    language: Annotated[str, AfterValidator(hook)] | None = None
    leaks: Leaks | None = None  # documents that contain evaluation texts
    exact_duplicates: bool = False  # documents that differ in white space alone
    # documents that are similar to an earlier one; `true` for all defaults
    near_duplicates: Annotated[NearDuplicates | None, BeforeValidator(switch)] = None
    min_tokens: CountOrZero = 0  # documents with fewer are removed


class SplitShares(Section):
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.01
    test: Annotated[float, Field(ge=0, lt=1)] = 0.0

    @model_validator(mode="after")
    def check_sum(self) -> "SplitShares":
        if self.validation + self.test >= 1:
            raise PydanticCustomError("shares", "expected validation and test to leave a part for training")
        return self


def as_sources(values: Any) -> Any:
    return (
        [{"path": each} if isinstance(each, str) else each for each in values] if isinstance(values, list) else values
    )


def not_trained(name: str) -> str:
    if name in TRAINED_TOKENIZERS:
        raise PydanticCustomError("trained", f"expected {{train: {name}, vocab_size: 32000}}, or a vocabulary's path")
    return name


def tokenizer_tag(value: Any) -> str:
    return UNION_TAGS[isinstance(value, dict | TrainedTokenizer)]


class Preparation(Section):
    # paths or mappings; documents keep this order
    sources: Annotated[list[Source], BeforeValidator(as_sources), Field(min_length=1)]
    out: ValidPath  # the directory to make
    # `bytes`, the path of a vocabulary, or one to train on the training split
    tokenizer: Annotated[
        Annotated[ValidPath, AfterValidator(not_trained), Tag(UNION_TAGS[0])]
        | Annotated[TrainedTokenizer, Tag(UNION_TAGS[1])],
        Discriminator(tokenizer_tag),
    ] = "bytes"
    # the token that begins a text precedes every document; auto: as in the vocabulary's own files
    bos: Literal["auto"] | bool = "auto"
    steps: CleaningSteps = CleaningSteps()  # removal of documents
    on_bad: Literal["skip", "error"] = "skip"  # a bad document: count it, or end with exit code 4
    max_document_bytes: Count = 2**26  # a longer document is bad input
    split: SplitShares = SplitShares()  # the shares of the text that are not for training
    shard_tokens: Count = 10**8  # tokens of a shard, at most, unless a document has more
    workers: Annotated[int, Field(ge=0, le=1024)] = 0  # processes; 0: one for each core

    @property
    def directory(self) -> Path:
        return Path(self.out).expanduser()

    @property
    def processes(self) -> int:
        if self.workers or sys.platform != "linux":
            return self.workers or os.cpu_count() or 1
        return len(os.sched_getaffinity(0))  # the cores that this process may use

    def identity(self) -> dict[str, Any]:
        """The keys that affect the data; `bos` only if set, so that data sets older than this key stay valid."""
        return self.model_dump(mode="json", exclude={"workers", "out", *(["bos"] if self.bos == "auto" else [])})
