"""A run's data, and the loader that batches it.  Text becomes token ids, split into training and validation.

Documents are ordered, and held out, by hashes of their texts; their names and the order given do not matter."""

import dataclasses
import functools
import hashlib
import itertools
import math
import platform
from collections.abc import Iterator, Sequence

import numpy as np

from spmd_lm.config.data_sections import (
    RULES,
    TRAINED_TOKENIZERS,
    CustomData,
    Data,
    Documents,
    Instructions,
    Synthetic,
    Task,
    Text,
    Tokens,
)
from spmd_lm.config.schema import MaskedLM, RunConfig
from spmd_lm.config.types import MOST
from spmd_lm.data.held_out import SHARE_MARGIN, count_held_out, place_to_cut
from spmd_lm.data.instructions.dataset import InstructionDataset, load_instructions
from spmd_lm.data.instructions.loader import InstructionLoader
from spmd_lm.data.loader import CORPUS_STREAM, BlendLoader, CausalLMLoader, Loader, SplitName
from spmd_lm.data.masked_lm.rows import MaskedLMLoader
from spmd_lm.data.sample_loader import SampleDataset, SampleLoader
from spmd_lm.data.shuffle import fold_in, permute
from spmd_lm.data.tasks.dataset import Split, TaskDataset, load_task
from spmd_lm.data.tasks.loader import TaskLoader
from spmd_lm.data.text_files import Document, read_documents, read_standard_library
from spmd_lm.data.token_array import TokenArray, TokensInMemory
from spmd_lm.data.token_files.dataset import TokenDataset, open_dataset
from spmd_lm.data.tokenizers.tokenizer import (
    SubwordTokenizer,
    Tokenizer,
    begin,
    fitting_tokenizer,
    make_tokenizer,
    put_bos,
)
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
    num_bytes: int  # size of the text, or of the token ids if there is no text
    tokenizer: Tokenizer  # knows where words begin, and which token separates documents
    warning: str = ""

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of both splits, in hex: runs with equal fingerprints saw the same tokens."""
        splits = self.train, self.validation
        digest = hashlib.sha256(" ".join(f"{split.dtype.str}:{split.size}" for split in splits).encode())
        for split in splits:
            digest.update(np.ascontiguousarray(split).data)
        return digest.hexdigest()

    def describe(self) -> str:
        documents = "1 document" if self.num_documents == 1 else f"{self.num_documents:,} documents"
        return (
            f"{self.name}: {documents}, {self.num_bytes / 1e6:.2f} MB, {self.train.size:,} training tokens, "
            f"{self.validation.size:,} validation tokens, sha256 {self.fingerprint[:12]}"
            + (self.warning and f". {self.warning}")
        )


Dataset = Corpus | TokenDataset | TaskDataset | InstructionDataset | SampleDataset


def load_data(data: Data | Synthetic, seed: int, vocab_size: int, rules: int = RULES, context: int = MOST) -> Dataset:
    """The tokens of a run, or its labelled examples.  Only synthetic data depends on `seed`, and only conversations on
    `context`, which truncates them.  Raises DataError for text that is missing, empty, unreadable or not UTF-8, for
    malformed examples, for a damaged vocabulary, and for a token id not below `vocab_size`; ConfigError for a
    vocabulary that requires more ids.  rules: a version, at most RULES."""
    if isinstance(data, Synthetic):
        return _markov_chain(data, seed, vocab_size)
    if isinstance(data, Documents):
        return _load_documents(data, vocab_size, rules)
    tokenizer = fitting_tokenizer(data, vocab_size, rules)
    if isinstance(data, Task):
        return load_task(data, tokenizer, vocab_size)
    if isinstance(data, Instructions):
        return load_instructions(data, tokenizer, vocab_size, context)
    if isinstance(data, CustomData):
        return SampleDataset(data, tokenizer)
    assert isinstance(data, Tokens)
    return open_dataset(data, tokenizer, vocab_size, rules)


def _load_documents(data: Documents, vocab_size: int, rules: int) -> Corpus:
    if isinstance(data, Text):
        name, documents = ", ".join(data.paths), read_documents(data.paths)
    else:
        name, documents = f"Python {platform.python_version()} standard library", read_standard_library()
    fraction = data.validation_fraction
    splits = split_documents(documents, fraction) if rules == RULES else split_by_name(documents, fraction)
    if data.tokenizer in TRAINED_TOKENIZERS:
        tokenizer: Tokenizer = put_bos(_train_tokenizer(data, splits[0], vocab_size), data.bos, rules)
    else:
        tokenizer = fitting_tokenizer(data, vocab_size, rules)
    _check_tokens(documents, tokenizer, vocab_size)
    if rules < RULES and len(documents) == 1:  # rules 1 cut the token ids, not the text
        undivided = _tokenize(documents, tokenizer)
        train, validation = np.split(undivided, [int((1 - fraction) * len(undivided))])
    else:
        train, validation = (_tokenize(split, tokenizer) for split in splits)
    num_bytes = sum(len(document.text) for document in documents)
    held_out = sum(len(document.text) for document in splits[1]) / num_bytes
    is_near = abs(held_out - fraction) <= 2 * SHARE_MARGIN * min(fraction, 1 - fraction)
    warning = "" if is_near else f"WARNING: {held_out:.1%} are held out, not data.validation_fraction={fraction:.1%}"
    return Corpus(name, train, validation, len(documents), num_bytes, tokenizer, warning)


def _train_tokenizer(data: Documents, documents: list[Document], vocab_size: int) -> SubwordTokenizer:
    """Trains on up to MAX_TRAINING_TEXT bytes of the documents."""
    texts = [document.text for document in documents]
    ends = np.cumsum([len(text) for text in texts])
    texts = texts[: max(1, int(np.searchsorted(ends, MAX_TRAINING_TEXT, side="right")))]

    def decoded() -> Iterator[str]:
        return (text[:MAX_TRAINING_TEXT].decode(errors="ignore") for text in texts)  # drops a cut character

    train = {"bpe": train_bpe, "wordpiece": train_wordpiece}[data.tokenizer]
    return SubwordTokenizer(data.tokenizer, train(vocab_size, decoded))


def make_loader(config: RunConfig, data: Dataset, split: SplitName) -> Loader:
    """Raises DataError for too little text or a label out of range, ConfigError if the vocabulary lacks the objective's
    special tokens."""
    if isinstance(data, SampleDataset):
        return SampleLoader(data, config, split)
    if isinstance(data, InstructionDataset):
        return InstructionLoader(data, config, split)
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
    """The loader of one corpus.  seed: determines its order; default train.seed."""
    if isinstance(config.objective, MaskedLM):
        return MaskedLMLoader(tokens, tokenizer, config, split, seed)
    loader = CausalLMLoader(tokens, config, split, seed)
    loader.bytes_per_token = tokenizer.bytes_per_token
    return loader


def make_blend_loader(
    splits: Sequence[TokenArray], weights: Sequence[float], tokenizer: Tokenizer, config: RunConfig, split: SplitName
) -> Loader:
    """The loader of several corpora; validation leaves out corpora without validation text."""
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


def _check_tokens(documents: list[Document], tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises DataError for a token beyond the model's vocabulary."""
    for document in documents if tokenizer.vocab_size > vocab_size else []:
        tokens = tokenizer.encode(document.text)
        if tokens.max(initial=0) >= vocab_size:
            offset = int(np.argmax(tokens >= vocab_size))
            raise DataError(
                f"{document.path}: token {tokens[offset]} at offset {offset} is not below model.vocab={vocab_size}. "
                f"Use model.vocab={int(tokens.max()) + 1} or more, or correct the text."
            )


def _tokenize(documents: list[Document], tokenizer: Tokenizer) -> np.ndarray:
    """Token ids of all documents, with separators if the tokenizer has one."""
    encoded, empty = [tokenizer.encode(document.text) for document in documents], tokenizer.encode("")
    separator = empty if tokenizer.eos_token_id is None else np.array([tokenizer.eos_token_id], empty.dtype)
    parts = itertools.chain.from_iterable((separator, begin(tokenizer, ids, document=True)) for ids in encoded)
    return np.concatenate([empty, *itertools.islice(parts, 1, None)])


def split_documents(documents: list[Document], share: float) -> tuple[list[Document], list[Document]]:
    """Training documents, and validation documents with `share` of the text; one document is cut if necessary."""
    digests = [hashlib.sha256(document.text).digest() for document in documents]
    order = sorted(range(len(documents)), key=digests.__getitem__)
    draws = np.array([int.from_bytes(digests[i][:6]) / 2**48 for i in order])
    count, size = count_held_out(draws, np.array([len(documents[i].text) for i in order]), share)
    validation, train = ([documents[i] for i in part] for part in (order[:count], order[count:]))
    if size:
        divided = train.pop(0)
        cut = place_to_cut(divided.text, len(divided.text) - size)
        parts = divided._replace(text=divided.text[:cut]), divided._replace(text=divided.text[cut:])
        train, validation = [parts[0], *train] if cut else train, [*validation, parts[1]]
    return train, validation


def split_by_name(documents: list[Document], share: float) -> tuple[list[Document], list[Document]]:
    """The split under rules 1: holds out `share` of the documents, whatever their sizes, or a single one's end."""
    if len(documents) == 1:
        (divided,) = documents
        cut = int((1 - share) * len(divided.text))
        return [divided._replace(text=divided.text[:cut])], [divided._replace(text=divided.text[cut:])]
    held_out = hold_out([document.name for document in documents], share)
    train, validation = ([*itertools.compress(documents, np.array(held_out) == part)] for part in (False, True))
    return train, validation


def hold_out(names: list[str], fraction: float) -> list[bool]:
    """Mask of documents held out for validation: about `fraction` of two or more, each chosen by its name alone.  If a
    split would be empty, the document nearest to the threshold moves there."""
    digests = [hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest() for name in names]
    draws = [int.from_bytes(digest[:6]) / 2**48 for digest in digests]  # uniform in [0, 1)
    held_out = [draw < fraction for draw in draws]
    held_out[draws.index(min(draws))] = True
    held_out[len(draws) - 1 - draws[::-1].index(max(draws))] = False  # last of equals: two of one name still split
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
