"""Which loader a configuration gets, and that of causal language models.

Masked text is in `masked_lm.rows`, labelled examples are in `tasks.loader`.

Shape suffixes: R rows, T context, S = T + 1."""

import numpy as np

from spmd_lm.batch import Batch
from spmd_lm.config.schema import MaskedLM, RunConfig
from spmd_lm.data.base_loader import OFFSET_STREAM, Loader, RowDraws, SplitName
from spmd_lm.data.corpus import Corpus
from spmd_lm.data.masked_lm.rows import MaskedLMLoader
from spmd_lm.data.shuffle import fold_in
from spmd_lm.data.tasks.dataset import Split, TaskDataset
from spmd_lm.data.tasks.loader import TaskLoader
from spmd_lm.errors import DataError


def make_loader(config: RunConfig, data: Corpus | TaskDataset, split: SplitName) -> Loader:
    """Raises DataError for too little text or a label out of range, ConfigError if the vocabulary lacks the objective's
    special tokens."""
    content = data.train if split == "training" else data.validation
    if isinstance(content, Split):
        return TaskLoader(content, data.tokenizer, config, split)
    if isinstance(config.objective, MaskedLM):
        return MaskedLMLoader(content, data.tokenizer, config, split)
    return CausalLMLoader(content, config, split)


class CausalLMLoader(Loader):
    """Windows of one long array of token ids, which may be a np.memmap; targets are the tokens one position later.

    In training, all windows of an epoch are shifted by one random offset."""

    def __init__(self, tokens: np.ndarray, config: RunConfig, split: SplitName):
        context = config.model.context
        assert tokens.ndim == 1
        if len(tokens) < context + 1:
            raise DataError(
                f"{split} text: {len(tokens)} tokens, but a row of model.context={context} and its last target need "
                f"{context + 1}. Add text, change data.validation_fraction, or lower model.context."
            )
        # Training leaves one context of text for the offset; a text too short for that has one window.
        num_windows = max(1, len(tokens) // context - 1) if split == "training" else (len(tokens) - 1) // context
        super().__init__(config, split, num_windows)
        self.tokens, self.num_offsets = tokens, min(context, len(tokens) - num_windows * context)

    def read(self, draws: RowDraws) -> Batch:
        offset_R = draws.example_R * self.context
        if draws.epoch_R is not None:
            offset_R += (fold_in(self.seed, OFFSET_STREAM, draws.epoch_R) % self.num_offsets).astype(np.int64)
        tokens_RS = self.tokens[offset_R[:, None] + np.arange(self.context + 1)].astype(np.int32)
        shape = len(offset_R), self.context
        return Batch(
            tokens=tokens_RS[:, :-1],
            targets=tokens_RS[:, 1:],
            loss_weights=np.broadcast_to(draws.valid_R[:, None], shape).astype(np.float32),
            positions=np.broadcast_to(np.arange(self.context, dtype=np.int32), shape),
            segments=None,
            sample_ids=draws.sample_ids_R.astype(np.int32),
        )
