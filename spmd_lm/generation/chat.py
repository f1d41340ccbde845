"""A conversation with a run: the user's turns are given, the model's are generated.

Messages are rendered by the chat template of the run's tokenizer, as `data.source: instructions` trains on them."""

import datetime
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from spmd_lm.checkpoints.restored import open_run
from spmd_lm.checkpoints.saved_run import make_run_tokenizer
from spmd_lm.config.data_sections import Data
from spmd_lm.config.load import data_of_run
from spmd_lm.config.schema import RunConfig
from spmd_lm.data.instructions.chat_template import Renderer, find_template
from spmd_lm.data.instructions.files import Conversation
from spmd_lm.data.tokenizers.tokenizer import check_ids, encode_markup
from spmd_lm.errors import ConfigError, DataError
from spmd_lm.generation.generate import Generator, require_generative
from spmd_lm.generation.sampling import Sampling
from spmd_lm.parallel.trees import Tree
from spmd_lm.step.program import Program


def chat_run(
    config: RunConfig,
    turns: Sequence[str],
    sampling: Sampling,
    fallback: bool = False,
    opened: tuple[Program, Tree] | None = None,
) -> list[str]:
    """Answers of a run's newest checkpoint to the user's turns of one conversation; each reads all answers before it.
    fallback, opened: as for `generate_run`.

    An answer ends at the end-of-sequence token, at the template's end of a turn, or after sampling.tokens.  Raises
    ConfigError for a model that is not causal or has no chat template, DataError for messages that the template
    refuses."""
    config = opened[0].config if opened else config
    require_generative(config)
    data = data_of_run(config)
    if not isinstance(data, Data):
        raise ConfigError(f"--chat: data.source={data.source} has token ids, and no messages. Leave it out.")
    tokenizer = make_run_tokenizer(config)
    template = find_template(data, tokenizer)
    with Renderer(template, datetime.datetime.now()) as renderer:
        ends = [end for end in (end_of_turn(renderer), template.special_tokens.get("eos_token")) if end]
        renderer.render_prompt(_conversation(turns[:1], []))  # fails before the checkpoint is read
        program, params = opened or open_run(config, fallback)[:2]
        generator, answers = Generator(program, 1, sampling, tokenizer), list[str]()
        for count in range(1, len(turns) + 1):
            text = renderer.render_prompt(_conversation(turns[:count], answers))
            ((ids, _),) = encode_markup(tokenizer, [text])
            check_ids(ids, config.model.vocab, f"prompt {turns[count - 1]!r:.60}")
            (generated,) = generator.generate(params, [ids.astype(np.int64)])
            new_ids = generated[len(ids) :]
            answer = tokenizer.decode(new_ids[: generator.length(new_ids)])
            for end in ends:
                answer = answer.partition(end)[0]
            answers.append(answer.strip())
    return answers


def end_of_turn(renderer: Renderer) -> str:
    """The template's text after an answer; '' for white space, or if unknown."""
    with suppress(DataError):
        messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
        (rendered,) = renderer.render([Conversation("--chat", messages)])
        for first, past in rendered.answers:
            return rendered.text[first:past].rpartition("answer")[2].strip()
    return ""


def _conversation(turns: Sequence[str], answers: Sequence[str]) -> Conversation:
    """The user's turns, each but the last with its answer."""
    messages = []
    for i, turn in enumerate(turns):
        messages.append({"role": "user", "content": turn})
        messages += [{"role": "assistant", "content": answer} for answer in answers[i : i + 1]]
    return Conversation("--chat", messages)
