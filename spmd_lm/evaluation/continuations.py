"""Continuations of a context as windows, for cloze tests, multiple choice and the harness.

A context and its continuation are tokenized as one text, and divided where the context's own tokens end; white space at
the end of the context belongs to the continuation, as in the EleutherAI harness."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from spmd_lm.data.tokenizers.tokenizer import Tokenizer, begin, check_ids
from spmd_lm.errors import DataError
from spmd_lm.evaluation.scoring import Windows


class Continuation(NamedTuple):
    """Token ids to score, after a context of at least one.  location: file and line, for messages."""

    location: str
    context: np.ndarray
    ids: np.ndarray


class Encoder(NamedTuple):
    """A run's tokenizer, and the size of its model's vocabulary."""

    tokenizer: Tokenizer
    vocab: int

    def encode(self, text: str | bytes, location: str) -> np.ndarray:
        """Token ids, int64.  Raises DataError for ids outside the vocabulary and for unreadable text."""
        try:
            ids = self.tokenizer.encode(text).astype(np.int64)
        except DataError as error:
            raise DataError(f"{location}: {error}") from None
        check_ids(ids, self.vocab, location)
        return ids

    def document(self, text: str | bytes, location: str) -> np.ndarray:
        """Token ids, after the document-start token if data.bos puts it before contexts."""
        return begin(self.tokenizer, self.encode(text, location))

    def continuation(self, context: str, text: str, location: str) -> Continuation:
        """`text` after `context`; after an empty one, as the beginning of a document.  Raises DataError for a text that
        adds no token, and for an empty context if no token starts a document."""
        stripped = context.rstrip()
        text = context[len(stripped) :] + text
        length = len(self.document(stripped, location))
        if length:
            ids = self.document(stripped + text, location)
        else:
            ids, length = np.concatenate([self.document_start(location), self.encode(text, location)]), 1
        if len(ids) <= length:
            raise DataError(f"{location}: {text!r:.40} adds no token to its context. Give a text that does.")
        return Continuation(location, ids[:length], ids[length:])

    def document_start(self, location: str) -> np.ndarray:
        """The token that starts a document, int64 [1]."""
        tokenizer = self.tokenizer
        start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        if start is None:
            raise DataError(
                f"{location}: an empty context, and this run's tokenizer has no token to start a document with. Give a "
                "context."
            )
        return np.array([start], np.int64)


def continuation_windows(items: Sequence[Continuation], context: int) -> tuple[Windows, np.ndarray]:
    """A window for each item, and the mask of items whose context is truncated from the left to `context` tokens, bool
    [N].  Raises DataError for a continuation that leaves no room for one token of its context."""
    windows, truncated = [], []
    for item in items:
        room = context + 1 - len(item.ids)
        if room < 1:
            raise DataError(
                f"{item.location}: a continuation of {len(item.ids)} tokens, but with model.context={context} at most "
                f"{context} can follow a token. Split it, or evaluate a model with a longer context."
            )
        truncated.append(len(item.context) > room)
        before = item.context[-room:]
        bounds = (np.array([bound]) for bound in (0, len(before), len(before) + len(item.ids)))
        windows.append(Windows(np.concatenate([before, item.ids]), *bounds))
    return Windows.concatenate(windows), np.array(truncated)
