"""Trains a tokenizer on the documents of the training split, as its library does: byte-level BPE or WordPiece.

The same documents make the same file.  What the library leaves to chance is the ids of WordPiece's `##x`, which it
gives out in the order of a hash table, and through them which of two equally frequent pairs it joins: here all letters
are given beforehand, in order."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from spmd_lm import files
from spmd_lm.data.tokenizers import vocabulary
from spmd_lm.errors import DataError
from spmd_lm.prepare.chunks import map_array, texts_of_chunk
from spmd_lm.prepare.duplicates import USED, CleanedChunks
from spmd_lm.prepare.schema import SplitShares, TrainedTokenizer
from spmd_lm.prepare.tokens import split_of

END_OF_TEXT = vocabulary.EOS_TOKENS[0]
WORDPIECE_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
CONTINUES = "##"
MAX_LETTERS = 1000  # of WordPiece; other letters are [UNK]


def train_tokenizer(
    settings: TrainedTokenizer, corpus: CleanedChunks, fates: np.ndarray, shares: SplitShares, directory: Path
) -> None:
    """Writes tokenizer.json into the directory.  DataError if there is no text to train on."""

    def texts() -> Iterator[str]:
        return training_texts(corpus, fates, shares, settings.sample_bytes)

    if next(texts(), None) is None:
        raise DataError("tokenizer: no document is left to train on. Remove fewer of them, or give a vocabulary.")
    trained = {"bpe": train_bpe, "wordpiece": train_wordpiece}[settings.train](settings, texts)
    directory.mkdir(exist_ok=True)
    files.write_atomically(directory / "tokenizer.json", trained.to_str(pretty=True))


def training_texts(corpus: CleanedChunks, fates: np.ndarray, shares: SplitShares, most: int) -> Iterator[str]:
    """The documents of the training split; if they have more than `most` bytes, those whose digests are least."""
    chosen = []
    for chunk in range(len(corpus.bases) - 1):
        digests = map_array(corpus.directory, chunk, "digests")
        used = np.array(fates[corpus.bases[chunk] : corpus.bases[chunk + 1]] == USED)
        used &= split_of(digests[:, 0], shares) == 0
        sizes = np.diff(map_array(corpus.directory, chunk, "ends"))
        chosen.append((np.flatnonzero(used), digests[used, 1], sizes[used]))
    order = np.argsort(np.concatenate([digests for _, digests, _ in chosen]), kind="stable")
    sizes = np.cumsum(np.concatenate([sizes for _, _, sizes in chosen])[order])
    taken = np.zeros(len(order), bool)
    taken[order[: max(int(np.searchsorted(sizes, most, "right")), 1)]] = True
    start = 0
    for chunk, (positions, _, _) in enumerate(chosen):
        of_chunk = positions[taken[start : start + len(positions)]]
        start += len(positions)
        for text in texts_of_chunk(corpus.directory, chunk, of_chunk.tolist()):
            yield text.decode()


def train_bpe(settings: TrainedTokenizer, texts: Callable[[], Iterator[str]]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    return tokenizer


def train_wordpiece(settings: TrainedTokenizer, texts: Callable[[], Iterator[str]]) -> Tokenizer:
    normalizer = normalizers.BertNormalizer(lowercase=settings.lowercase)
    counts: Counter[str] = Counter()
    for text in texts():
        counts.update(normalizer.normalize_str(text))
    del counts[" "], counts["\n"]
    by_count = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    letters = sorted(letter for letter, _ in by_count[: min(MAX_LETTERS, settings.vocab_size // 3)])

    tokenizer = wordpiece_model({}, normalizer)
    trainer = trainers.WordPieceTrainer(
        vocab_size=settings.vocab_size,
        special_tokens=[*WORDPIECE_TOKENS, *letters, *(CONTINUES + letter for letter in letters)],
        initial_alphabet=letters,
        limit_alphabet=len(letters),
        continuing_subword_prefix=CONTINUES,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    tokens = tokenizer.get_vocab(with_added_tokens=False)
    trained = wordpiece_model(tokens, normalizer)  # letters are special tokens for the trainer alone
    trained.add_special_tokens(WORDPIECE_TOKENS)
    return trained


def wordpiece_model(tokens: dict[str, int], normalizer: normalizers.Normalizer) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(tokens, unk_token="[UNK]", continuing_subword_prefix=CONTINUES))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix=CONTINUES)
    return tokenizer
