"""SentencePiece models, through its own package."""

import functools

import numpy as np
from numpy.typing import ArrayLike

from spmd_lm.data.masked_lm.word_boundaries import WordBoundaries
from spmd_lm.data.tokenizers.tokenizer import METASPACE, VocabularyTokenizer, utf8
from spmd_lm.data.tokenizers.vocabulary import MAX_TOKENS, read_vocabulary
from spmd_lm.errors import ConfigError, DataError


class SentencePieceTokenizer(VocabularyTokenizer):
    """Uses the package's ids.  Control symbols, such as </s>, never occur in encoded text."""

    bytes_per_token = None  # text is normalized, so that tokens do not spell it out

    def __init__(self, name: str):
        """Raises DataError for a model that is missing or damaged, ConfigError without the package."""
        path, model = read_vocabulary(name)
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError:
            raise ConfigError(
                f"data.tokenizer={name}: {path.name} is a SentencePiece model. Install its package: pip install "
                "'spmd-lm[sentencepiece]'."
            ) from None
        try:
            self.processor = SentencePieceProcessor(model_proto=model)
            size = self.processor.vocab_size()
            pieces = [self.processor.id_to_piece(token_id) for token_id in range(min(size, MAX_TOKENS))]
        except (RuntimeError, IndexError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: not a SentencePiece model: {error!s:.200}. Download the file again.") from None
        if not pieces or len(pieces) < size:
            raise DataError(f"{path}: it has {size:,} tokens. A vocabulary has 1 to {MAX_TOKENS:,}.")
        super().__init__(name, {piece: token_id for token_id, piece in enumerate(pieces)})
        self.vocab_size = self.required_vocab = size  # two pieces may be spelled alike
        own = self.processor.eos_id(), self.processor.bos_id()
        self.eos_token_id, bos = (token_id if token_id >= 0 else None for token_id in own)
        self.bos_token_id = self.eos_token_id if bos is None else bos

    def encode(self, text: str | bytes) -> np.ndarray:
        """Bytes of a prompt that are not UTF-8 become U+FFFD."""
        return np.array(self.processor.encode(utf8(text).decode("utf-8", "replace")), self.dtype)

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        pieces = self.processor.encode(text, return_type="proto").pieces
        # The package counts bytes of UTF-8.
        starts = np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8) & 0xC0 != 0x80
        characters = np.concatenate([[0], np.cumsum(starts)]).astype(np.int32)
        offsets = np.array([(piece.begin, piece.end) for piece in pieces], np.int64).reshape(-1, 2)
        return np.array([piece.id for piece in pieces], self.dtype), characters[offsets]

    def decode(self, ids: ArrayLike) -> str:
        """Ids of a padded vocabulary beyond the tokens have no text."""
        ids = np.asarray(ids)
        return self.processor.decode(ids[ids < self.vocab_size].tolist())

    @functools.cached_property
    def _words(self) -> WordBoundaries:
        tokens: list[str | None] = [self.processor.id_to_piece(token_id) for token_id in range(self.vocab_size)]
        hidden = (self.processor.is_control, self.processor.is_unknown, self.processor.is_unused)
        special = {self.token_to_id[token] for token in self.row_tokens}
        for token_id in range(self.vocab_size):
            if token_id in special or any(is_hidden(token_id) for is_hidden in hidden):
                tokens[token_id] = None
        starts = [token is not None and token.startswith(METASPACE) for token in tokens]
        return WordBoundaries.from_marked(tokens, starts)
