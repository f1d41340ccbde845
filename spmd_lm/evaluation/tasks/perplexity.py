"""`text`, `validation` and `test`: perplexity of a text, in sliding windows."""

from typing import ClassVar

import numpy as np

from spmd_lm.data.text_files import SUFFIXES
from spmd_lm.data.tokenizers.tokenizer import NumberTokenizer
from spmd_lm.errors import DataError
from spmd_lm.evaluation.bootstrap import Metric
from spmd_lm.evaluation.scoring import Scored, Windows, sliding_windows
from spmd_lm.evaluation.tasks.task import EvalTask, TaskFigures, TaskInput

LARGEST_BLOCK = 32  # neighbouring tokens resampled together, at most: their losses are not independent


class TextTask(EvalTask):
    """`text=PATH`: each document by itself.

    n: scored tokens, all but a document's first.
    skipped: documents of a directory or a glob with too few tokens. nats_per_token and its exponential, perplexity;
      nats_per_byte, where the documents' bytes are known."""

    name = "text"
    suffixes = SUFFIXES
    slides = True
    default_stride: ClassVar[int | None] = None  # the context

    def __init__(self, given: TaskInput):
        documents = self.documents(given)
        texts = [(self.prepare(document.text), str(document.path)) for document in documents]
        encoded = [given.encoder.document(text, location) for text, location in texts]
        scored = [i for i, ids in enumerate(encoded) if len(ids) > 1]
        if not scored:
            count = "1 token" if len(encoded[0]) else "no tokens"
            raise DataError(f"{texts[0][1]}: {count}, but a perplexity needs 2: one to predict another. Add text.")
        self.set_windows(given, [encoded[i] for i in scored])
        self.skipped = len(documents) - len(scored)
        is_text = not isinstance(given.encoder.tokenizer, NumberTokenizer)
        self.num_bytes = sum(len(texts[i][0].encode()) for i in scored) if is_text else None
        self.words = sum(self.count_words(documents[i].text) for i in scored)

    def prepare(self, text: bytes) -> str:
        return text.decode("utf-8-sig")

    def count_words(self, text: bytes) -> int:
        """Words of a document, for a subclass with a metric per word."""
        return 0

    def set_windows(self, given: TaskInput, documents: list[np.ndarray]) -> None:  # of token ids
        stride = given.stride or min(self.default_stride or given.context, given.context)
        parts = [sliding_windows(ids, given.context, stride) for ids in documents]
        self.windows: Windows = Windows.concatenate(parts)
        self.num_tokens = sum(map(len, documents))

    def figures(self, scored: Scored) -> TaskFigures:
        count = len(scored.log_likelihood)
        starts = np.arange(0, count, max(1, min(LARGEST_BLOCK, count // LARGEST_BLOCK)))
        loss = -np.add.reduceat(scored.log_likelihood, starts)
        tokens = np.diff([*starts, count]).astype(np.float64)
        metrics = {"perplexity": Metric(loss, tokens, np.exp), "nats_per_token": Metric(loss, tokens)}
        if self.num_bytes:
            metrics["nats_per_byte"] = Metric(loss, tokens * self.num_bytes / count)
        metrics |= self.more_metrics(loss, tokens / count)
        return TaskFigures.of(metrics, count, tokens=self.num_tokens, **self.more_counts())

    def more_metrics(self, loss: np.ndarray, share: np.ndarray) -> dict[str, Metric]:
        """A subclass's metrics.

        loss: in nats, of each resampled block of tokens.
        share: of each block among all scored tokens."""
        return {}

    def more_counts(self) -> dict[str, int]:
        return {"skipped": self.skipped}


class ValidationTask(TextTask):
    """`validation`: the run's validation split, as one text."""

    name = "validation"
    takes_path = False

    def __init__(self, given: TaskInput):
        text = given.split(self.name)
        self.set_windows(given, [text.tokens])
        self.num_bytes = text.num_bytes

    def more_counts(self) -> dict[str, int]:
        return {}


class PreparedTestTask(ValidationTask):
    """`test`: the test split made by `spmd-lm prepare`, as one text."""

    name = "test"
