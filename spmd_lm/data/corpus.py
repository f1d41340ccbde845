"""A run's data and the loader of its batches.  Text is token ids, split into training and validation.

A document goes to validation by a hash of its name, so adding files never moves another one to the other split, and no
document is in both."""

import dataclasses
import functools
import hashlib
import math
import platform
from collections.abc import Iterator, Sequence

import numpy as np

from spmd_lm.config.data_sections import TRAINED_TOKENIZERS, Data, Documents, Synthetic, Task, Text, Tokens
from spmd_lm.config.schema import MaskedLM, RunConfig
from spmd_lm.data.loader import CORPUS_STREAM, BlendLoader, CausalLMLoader, Loader, SplitName
from spmd_lm.data.masked_lm.rows import MaskedLMLoader
from spmd_lm.data.shuffle import fold_in, permute
from spmd_lm.data.tasks.dataset import Split, TaskDataset, load_task
from spmd_lm.data.tasks.loader import TaskLoader
from spmd_lm.data.text_files import Document, read_documents, read_standard_library
from spmd_lm.data.token_array import TokenArray, TokensInMemory
from spmd_lm.data.token_files.dataset import TokenDataset, open_dataset
from spmd_lm.data.tokenizers.tokenizer import SubwordTokenizer, Tokenizer, make_tokenizer
from spmd_lm.data.tokenizers.training import train_bpe, train_wordpiece
from spmd_lm.errors import ConfigError, DataError

MAX_TRAINING_TEXT = 2**26  # bytes that a tokenizer is trained on
SYNTHETIC_TRAIN_TOKENS, SYNTHETIC_VALIDATION_TOKENS = 2**20, 2**16


@dataclasses.dataclass(frozen=True)
class Corpus:
    name: str
    train: np.ndarray  # token ids, 1-D, unsigned
    validation: np.ndarray
    num_documents: int
    num_bytes: int  # of text; of token ids where there is no text
    tokenizer: Tokenizer  # knows where words begin, and which token separates documents

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of both splits, in hex: runs with the same fingerprint saw the same tokens."""
        splits = self.train, self.validation
        digest = hashlib.sha256(" ".join(f"{split.dtype.str}:{split.size}" for split in splits).encode())
        for split in splits:
            digest.update(np.ascontiguousarray(split).data)
        return digest.hexdigest()

    def describe(self) -> str:
        """One line with its sizes."""
        documents = "1 document" if self.num_documents == 1 else f"{self.num_documents:,} documents"
        return (
            f"{self.name}: {documents}, {self.num_bytes / 1e6:.2f} MB, {self.train.size:,} training tokens, "
            f"{self.validation.size:,} validation tokens, sha256 {self.fingerprint[:12]}"
        )


Dataset = Corpus | TokenDataset | TaskDataset


def load_data(data: Data | Synthetic, seed: int, vocab_size: int) -> Dataset:
    """The tokens of a run, or its labelled examples.  Only synthetic data depends on `seed`.

    Raises DataError for text that is missing, empty, unreadable or not UTF-8, for malformed examples, for a damaged
    vocabulary, and for a token id not below `vocab_size`; ConfigError for a vocabulary larger than that."""
    if isinstance(data, Synthetic):
        return _markov_chain(data, seed, vocab_size)
    if isinstance(data, Documents):
        return _load_documents(data, vocab_size)
    tokenizer = _fitting_tokenizer(data, vocab_size)
    if isinstance(data, Task):
        return load_task(data, tokenizer)
    assert isinstance(data, Tokens)
    return open_dataset(data, tokenizer, vocab_size)


def _fitting_tokenizer(data: Data, vocab_size: int) -> Tokenizer:
    tokenizer = make_tokenizer(data)
    if data.tokenizer != "bytes" and tokenizer.vocab_size > vocab_size:  # for bytes, only those that occur matter
        raise ConfigError(
            f"model.vocab={vocab_size} is less than the {tokenizer.vocab_size} tokens of "
            f"data.tokenizer={data.tokenizer}. Use model.vocab={tokenizer.vocab_size} or more."
        )
    return tokenizer


def _load_documents(data: Documents, vocab_size: int) -> Corpus:
    if isinstance(data, Text):
        name, documents = ", ".join(data.paths), read_documents(data.paths)
    else:
        name, documents = f"Python {platform.python_version()} standard library", read_standard_library()
    if data.tokenizer in TRAINED_TOKENIZERS:
        tokenizer: Tokenizer = _train_tokenizer(data, documents, vocab_size)
    else:
        tokenizer = _fitting_tokenizer(data, vocab_size)
    return _tokenize(name, documents, tokenizer, data.validation_fraction, vocab_size)


def _train_tokenizer(data: Documents, documents: list[Document], vocab_size: int) -> SubwordTokenizer:
    """On the training documents, up to MAX_TRAINING_TEXT bytes; of a single one, on the part that is trained on."""
    fraction = data.validation_fraction
    if len(documents) == 1:
        (document,) = documents
        texts = [document.text[: int((1 - fraction) * len(document.text))]]
    else:
        held_out = hold_out([document.name for document in documents], fraction)
        texts = [document.text for document, is_held_out in zip(documents, held_out, strict=True) if not is_held_out]
    ends = np.cumsum([len(text) for text in texts])
    texts = texts[: max(1, int(np.searchsorted(ends, MAX_TRAINING_TEXT, side="right")))]

    def decoded() -> Iterator[str]:
        return (text[:MAX_TRAINING_TEXT].decode(errors="ignore") for text in texts)  # a cut character

    train = {"bpe": train_bpe, "wordpiece": train_wordpiece}[data.tokenizer]
    return SubwordTokenizer(data.tokenizer, train(vocab_size, decoded))


def make_loader(config: RunConfig, data: Dataset, split: SplitName) -> Loader:
    """Raises DataError for too little text or a label out of range, ConfigError if the vocabulary lacks the objective's
    special tokens."""
    if isinstance(data, TokenDataset):
        splits = [corpus.train if split == "training" else corpus.validation for corpus in data.corpora]
        weights = [corpus.weight for corpus in data.corpora]
        return make_blend_loader(splits, weights, data.tokenizer, config, split)
    content = data.train if split == "training" else data.validation
    if isinstance(content, Split):
        return TaskLoader(content, data.tokenizer, config, split)
    return make_text_loader(TokensInMemory(content, data.tokenizer.eos_token_id), data.tokenizer, config, split)


def make_text_loader(
    tokens: TokenArray, tokenizer: Tokenizer, config: RunConfig, split: SplitName, seed: int | None = None
) -> Loader:
    """Of one corpus.  seed: of its order; default train.seed."""
    if isinstance(config.objective, MaskedLM):
        return MaskedLMLoader(tokens, tokenizer, config, split, seed)
    loader = CausalLMLoader(tokens, config, split, seed)
    loader.bytes_per_token = tokenizer.bytes_per_token
    return loader


def make_blend_loader(
    splits: Sequence[TokenArray], weights: Sequence[float], tokenizer: Tokenizer, config: RunConfig, split: SplitName
) -> Loader:
    """Of several corpora.  Those without validation text are left out of validation."""
    if len(splits) == 1:
        return make_text_loader(splits[0], tokenizer, config, split)
    present = [i for i, tokens in enumerate(splits) if tokens.size or split == "training"]
    seeds = [int(fold_in(config.train.seed, CORPUS_STREAM, i)) for i in present]
    loaders = [make_text_loader(splits[i], tokenizer, config, split, s) for i, s in zip(present, seeds, strict=True)]
    if not loaders:
        raise DataError("validation text: no corpus of data.blend has any. Prepare some, or set train.eval_every=0.")
    loader = BlendLoader(loaders, [weights[i] for i in present], config, split)
    loader.bytes_per_token = loaders[0].bytes_per_token
    return loader


def _tokenize(name: str, documents: list[Document], tokenizer: Tokenizer, fraction: float, vocab_size: int) -> Corpus:
    encoded = [tokenizer.encode(document.text) for document in documents]
    for document, tokens in zip(documents, encoded, strict=True):
        if tokens.max(initial=0) >= vocab_size:
            offset = int(np.argmax(tokens >= vocab_size))
            raise DataError(
                f"{document.path}: token {tokens[offset]} at offset {offset} is not below model.vocab={vocab_size}. "
                f"Use model.vocab={int(tokens.max()) + 1} or more, or correct the text."
            )
    if len(documents) == 1:
        cut = int((1 - fraction) * len(encoded[0]))
        train, validation = encoded[0][:cut], encoded[0][cut:]
    else:
        eos = tokenizer.eos_token_id
        separator = np.array([] if eos is None else [eos], encoded[0].dtype)
        splits: tuple[list[np.ndarray], list[np.ndarray]] = [], []
        held_out = hold_out([document.name for document in documents], fraction)
        for tokens, is_validation in zip(encoded, held_out, strict=True):
            splits[is_validation].extend((separator, tokens))
        train, validation = (np.concatenate(split[1:]) for split in splits)
    num_bytes = sum(len(document.text) for document in documents)
    return Corpus(name, train, validation, len(documents), num_bytes, tokenizer)


def hold_out(names: list[str], fraction: float) -> list[bool]:
    """Which of two or more documents are for validation: about `fraction` of them, each by its name alone.

    If that would leave a split empty, the document nearest to the threshold moves there."""
    digests = [hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest() for name in names]
    draws = [int.from_bytes(digest[:6]) / 2**48 for digest in digests]  # uniform in [0, 1)
    held_out = [draw < fraction for draw in draws]
    held_out[draws.index(min(draws))] = True
    held_out[len(draws) - 1 - draws[::-1].index(max(draws))] = False  # the last of equals: two of one name still split
    return held_out


def _markov_chain(data: Synthetic, seed: int, vocab_size: int) -> Corpus:
    """A Markov chain in which each token has `branching` equally likely successors, and as many predecessors.

    State c steps to (branching * c + draw + 1) mod vocab_size, a de Bruijn graph: any token follows any other within
    log(vocab_size) / log(branching) steps, and all are equally frequent.  A permutation then hides the arithmetic, so
    that a model must learn a table.  The recurrence is linear: log2(length) vectorized passes compute it, with no loop
    over tokens."""
    branching = data.branching
    if branching > vocab_size:
        raise ConfigError(
            f"data.branching={branching}: a token cannot have more successors than model.vocab={vocab_size} has "
            f"tokens. Use data.branching={min(4, vocab_size)}, or a larger model.vocab."
        )
    length = SYNTHETIC_TRAIN_TOKENS + SYNTHETIC_VALIDATION_TOKENS
    states = (fold_in(seed, 1, np.arange(length)) % branching + 1).astype(np.int64)
    reach, factor = 1, branching
    while reach < length:
        states[reach:] = (states[reach:] + factor * states[:-reach]) % vocab_size
        reach, factor = 2 * reach, factor * factor % vocab_size
    token_of_state = permute(np.arange(vocab_size), vocab_size, fold_in(seed, 0))
    tokens = token_of_state.astype(np.min_scalar_type(vocab_size - 1))[states % vocab_size]
    train, validation = tokens[:SYNTHETIC_TRAIN_TOKENS], tokens[SYNTHETIC_TRAIN_TOKENS:]
    name = f"Markov chain of {math.log(branching):.4f} nat per token"
    return Corpus(name, train, validation, 1, tokens.nbytes, make_tokenizer(data))
