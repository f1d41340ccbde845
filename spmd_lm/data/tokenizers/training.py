"""Tokenizers trained on documents by Hugging Face's library: byte-level BPE, or WordPiece.

Equal documents give equal files.  The library assigns ids of WordPiece's `##x` in the order of a hash table, and breaks
ties between equally frequent pairs by these ids; so all letters are passed beforehand, in order."""

from collections import Counter
from collections.abc import Callable, Iterator

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from spmd_lm.data.tokenizers.vocabulary import EOS_TOKENS

Texts = Callable[[], Iterator[str]]  # the documents, from the start at every call

END_OF_TEXT = EOS_TOKENS[0]
WORDPIECE_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
CONTINUES = "##"
MAX_LETTERS = 1000  # in a trained WordPiece vocabulary; others are [UNK]


def train_bpe(vocab_size: int, texts: Texts) -> Tokenizer:
    """Trains at most `vocab_size` tokens, among them the 256 bytes and END_OF_TEXT."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    return tokenizer


def train_wordpiece(vocab_size: int, texts: Texts, *, lowercase: bool = True) -> Tokenizer:
    """Trains at most `vocab_size` tokens, among them WORDPIECE_TOKENS; at most a third are letters, and as many their
    continuations (`##x`)."""
    normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    counts: Counter[str] = Counter()
    for text in texts():
        counts.update(normalizer.normalize_str(text))
    del counts[" "], counts["\n"]
    by_count = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    letters = sorted(letter for letter, _ in by_count[: min(MAX_LETTERS, vocab_size // 3)])

    tokenizer = wordpiece_model({}, normalizer)
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
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
