"""The likeliest tokens at each [MASK] of a text, by a model trained on masked tokens.  One [MASK] stands for one token:
a byte, a piece of a word, or a word."""

from typing import NamedTuple

import jax
import numpy as np

from spmd_lm.batch import Batch
from spmd_lm.checkpoints.restored import open_run
from spmd_lm.checkpoints.saved_run import make_run_tokenizer
from spmd_lm.config.schema import MaskedLM, RunConfig
from spmd_lm.data.masked_lm.word_boundaries import SpecialTokens
from spmd_lm.data.tokenizers.tokenizer import Tokenizer, check_ids
from spmd_lm.errors import ConfigError, DataError
from spmd_lm.generation.generate import mask_logits
from spmd_lm.parallel.trees import Tree
from spmd_lm.runtime.compiler_workarounds import exclusive_first_call
from spmd_lm.step.program import Program

MASK = "[MASK]"  # in a text, whatever the vocabulary calls it


class Prediction(NamedTuple):
    token: str
    probability: float


def fill_mask_run(config: RunConfig, text: str, top: int) -> list[list[Prediction]]:
    """`fill_mask` with a run's newest checkpoint.  Raises ConfigError for a model that was not trained on masked
    tokens."""
    if not isinstance(config.objective, MaskedLM):
        raise ConfigError(
            f"{config.run.directory}: objective.kind={config.objective.kind} has not learned to predict masked tokens. "
            "Use a run with objective.kind=masked_lm."
        )
    program, params, _ = open_run(config)
    return fill_mask(program, params, text, top)


def fill_mask(program: Program, params: Tree, text: str, top: int) -> list[list[Prediction]]:
    """The `top` likeliest tokens for each [MASK] in `text`, likeliest first.  The text is read as one row, [CLS] text
    [SEP].  Raises DataError for a text that lacks [MASK], is too long, or has a token that the model lacks."""
    tokenizer, model = make_run_tokenizer(program.config), program.config.model
    special, _ = tokenizer.special_tokens_and_words()
    ids = row_of(text, tokenizer, special)
    check_ids(ids, model.vocab, f"{text!r:.60}")
    if len(ids) > model.context:
        raise DataError(
            f"{text!r:.60} has {len(ids)} tokens with [CLS] and [SEP], but a row of this model holds {model.context}. "
            "Shorten it."
        )
    is_token = tokenizer.has_text(model.vocab)
    is_token[[special.cls, special.sep, special.mask, special.pad]] = True
    if not 1 <= top <= is_token.sum():
        raise ConfigError(f"top={top}: ask for 1 to {is_token.sum()} tokens, the size of the vocabulary.")
    masks = np.flatnonzero(ids == special.mask)
    columns = np.arange(model.context)
    padded = np.append(ids, np.full(model.context - len(ids), special.pad, np.int32))
    batch = program.repeated_row(padded, (columns < len(ids)).astype(np.int32))

    def probabilities(params: Tree, batch: Batch) -> jax.Array:
        logits = program.forward(params, batch)["tokens"][0, 0, masks]  # the first row; all are alike
        return jax.nn.softmax(mask_logits(logits, is_token))

    execute = exclusive_first_call(jax.jit(probabilities, compiler_options=program.xla_options.deterministic))
    chances = np.asarray(execute(params, batch))
    likeliest = np.argsort(-chances, axis=-1, kind="stable")[:, :top]
    return [
        [Prediction(tokenizer.decode([token]), float(row[token])) for token in tokens]
        for row, tokens in zip(chances, likeliest, strict=True)
    ]


def row_of(text: str, tokenizer: Tokenizer, special: SpecialTokens) -> np.ndarray:
    """Token ids of [CLS] text [SEP], int32.  Raises DataError for a text without [MASK]."""
    if MASK not in text:
        raise DataError(f"{text!r:.60} hides nothing. Write {MASK} for each token that is to be predicted.")
    before, *after = text.split(MASK)
    ids = [special.cls, *tokenizer.encode(before)]
    for part in after:
        ids += [special.mask, *tokenizer.encode(part)]
    return np.array([*ids, special.sep], np.int32)
