"""Text generation: prompts are tokenized, continued by the `Generator`, and decoded.

`spmd-lm generate` does so with a run's newest checkpoint."""

from collections.abc import Sequence

import numpy as np

from spmd_lm.checkpoints.saved_run import open_run
from spmd_lm.config.schema import RunConfig
from spmd_lm.data.tokenizers.tokenizer import Tokenizer, make_tokenizer
from spmd_lm.errors import ConfigError, DataError
from spmd_lm.generation.generator import Generator
from spmd_lm.generation.sampling import Sampling
from spmd_lm.parallel.plan import Tree
from spmd_lm.step.program import Program


def generate_run(config: RunConfig, prompts: list[str], sampling: Sampling) -> list[str]:
    """`generate_text` with a run's newest checkpoint.  Raises ConfigError for a model that is not causal."""
    if not config.model.causal:
        raise ConfigError(
            f"{config.run.directory}: model.kind={config.model.kind} predicts masked tokens and cannot generate text. "
            "Generate from a run with model.kind=gpt."
        )
    program, params, _ = open_run(config)
    return generate_text(program, params, prompts, sampling)


def generate_text(program: Program, params: Tree, prompts: Sequence[str], sampling: Sampling) -> list[str]:
    """Each prompt with its continuation, up to the end of the document.  An empty prompt starts a document.

    Raises DataError for a prompt with a token outside the vocabulary; and for an empty one, if the tokenizer has no
    token to start a document with."""
    tokenizer = make_tokenizer(program.config.data)
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    prompt_ids = [np.array([*start, *tokenizer.encode(prompt)], np.int64) for prompt in prompts]
    _check_prompts(prompts, prompt_ids, program.config.model.vocab)
    generated = Generator(program, len(prompt_ids), sampling).generate(params, prompt_ids)
    return [
        tokenizer.decode(_until_end(ids, len(prompt), tokenizer)[len(start) :])
        for ids, prompt in zip(generated, prompt_ids, strict=True)
    ]


def _check_prompts(prompts: Sequence[str], prompt_ids: list[np.ndarray], vocab: int) -> None:
    for prompt, ids in zip(prompts, prompt_ids, strict=True):
        if not ids.size:
            raise DataError(
                "an empty prompt: this run's tokenizer has no token to start a document with. Give a prompt, as in "
                "--prompt '3 1'."
            )
        if ids.max() >= vocab:
            raise DataError(f"prompt {prompt!r:.60}: token {ids.max()} is not below model.vocab={vocab}.")


def _until_end(ids: np.ndarray, prompt_length: int, tokenizer: Tokenizer) -> np.ndarray:
    """The ids before the first end-of-document token that follows the prompt."""
    ends = np.flatnonzero(ids[prompt_length:] == tokenizer.eos_token_id)
    return ids[: prompt_length + ends[0]] if len(ends) else ids
