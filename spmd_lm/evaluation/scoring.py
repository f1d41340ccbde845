"""Log-likelihoods of chosen tokens under a causal model, for every zero-shot task.

A task gives the tokens to score as windows of token ids.  They become rows of the run's own batches, under its own
layout, so one compiled program serves all tasks; padding rows fill the last batch and never change a result.

Shape suffixes: K token ids, N windows, S scored tokens of all windows, R rows of a batch, T the context."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from spmd_lm.batch import Batch
from spmd_lm.config.data_sections import packs_documents
from spmd_lm.config.schema import RunConfig
from spmd_lm.data.loader import Loader, SampleIndices
from spmd_lm.errors import NonFiniteError
from spmd_lm.parallel.trees import Tree
from spmd_lm.step.program import Program


@dataclasses.dataclass(frozen=True)
class Windows:
    """Window n is tokens[start[n] : stop[n]], at most T + 1 of them: the model reads all but the last, and those from
    tokens[first[n]] on are scored.  start < first < stop."""

    tokens: np.ndarray  # [K]
    start: np.ndarray  # int64 [N]
    first: np.ndarray  # int64 [N]
    stop: np.ndarray  # int64 [N]

    @classmethod
    def concatenate(cls, parts: "Sequence[Windows]") -> "Windows":
        offsets = np.cumsum([0, *(len(part.tokens) for part in parts[:-1])])
        tokens = np.concatenate([part.tokens for part in parts])
        moved = ((part.start + o, part.first + o, part.stop + o) for part, o in zip(parts, offsets, strict=True))
        return cls(tokens, *map(np.concatenate, zip(*moved, strict=True)))


def sliding_windows(tokens: np.ndarray, context: int, stride: int, *, last_is_full: bool = False) -> Windows:
    """Windows that move by `stride`, at most `context`, over a text of at least 2 tokens.  Every token but the first,
    which has no context, is scored once, in the first window that predicts it.
    last_is_full: start the last window earlier, for all the context there is, instead of making it shorter."""
    last = len(tokens) - 1
    assert last >= 1 and 1 <= stride <= context
    number = 1 + -(-max(last - context, 0) // stride)
    start = stride * np.arange(number)
    stop = np.minimum(start + context, last) + 1
    first = np.concatenate([[1], stop[:-1]])
    return Windows(tokens, np.minimum(start, max(last - context, 0)) if last_is_full else start, first, stop)


class Scored(NamedTuple):
    log_likelihood: np.ndarray  # float64 [S], in nats, in the windows' order
    greedy: np.ndarray  # bool [S]: argmax takes the token
    bounds: np.ndarray  # int64 [N + 1]: window n has entries bounds[n] to bounds[n + 1] - 1

    def window_log_likelihood(self) -> np.ndarray:
        """Sums over each window's tokens, [N]."""
        return np.add.reduceat(self.log_likelihood, self.bounds[:-1])

    def window_greedy(self) -> np.ndarray:
        """Mask of windows in which argmax takes every token, bool [N]."""
        return np.logical_and.reduceat(self.greedy, self.bounds[:-1])


class WindowLoader(Loader):
    """Windows as rows; scored targets have weight 1, others 0."""

    def __init__(self, windows: Windows, config: RunConfig):
        super().__init__(config, "validation", len(windows.start))
        self.packs_documents = packs_documents(config.data)
        self.windows, self.num_validated = windows, self.num_examples  # train.eval_batches does not cut a task short

    def read(self, indices: SampleIndices) -> Batch:
        w, position = self.windows, np.arange(self.context + 1)
        start, first, stop = (bound[indices.example_R][:, None] for bound in (w.start, w.first, w.stop))
        index = start + position
        tokens = np.where(index < stop, w.tokens[np.minimum(index, len(w.tokens) - 1)], 0).astype(np.int32)
        is_scored = (index >= first) & (index < stop) & indices.valid_R[:, None]
        return Batch(
            tokens=tokens[:, :-1],
            targets=tokens[:, 1:],
            loss_weights=is_scored[:, 1:].astype(np.float32),
            positions=np.broadcast_to(position[:-1].astype(np.int32), is_scored[:, 1:].shape),
            segments=np.ones_like(tokens[:, 1:]) if self.packs_documents else None,
            sample_ids=indices.sample_ids_R.astype(np.int32),
        )


class Scorer:
    """Scores windows with a program's model.  params: laid out for the program's functions."""

    def __init__(self, program: Program, params: Tree):
        self.program, self.params = program, params

    def __call__(self, windows: Windows) -> Scored:
        """Raises NonFiniteError for a log-likelihood that is NaN or infinite."""
        loader, program = WindowLoader(windows, self.program.config), self.program
        log_likelihood, greedy = [], []
        for step in range(len(loader)):
            scores = jax.device_get(program.score(self.params, loader.batch(step, program.batch_shardings)))
            is_scored = loader.rows(step, 0, loader.batch_size).loss_weights > 0
            log_likelihood.append(scores["log_likelihood"][is_scored].astype(np.float64))
            greedy.append(scores["greedy"][is_scored] > 0)
        scored = Scored(
            np.concatenate(log_likelihood),
            np.concatenate(greedy),
            np.concatenate([[0], np.cumsum(windows.stop - windows.first)]),
        )
        if not np.isfinite(scored.log_likelihood).all():
            raise NonFiniteError(
                f"{program.config.run.directory}: this checkpoint's log-likelihoods are not finite. Evaluate an older "
                "one, or set precision.compute=float32."
            )
        return scored
