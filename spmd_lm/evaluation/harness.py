"""A run as a model of the EleutherAI harness (the extra `lm-eval`), for the tasks that the harness knows.

    import lm_eval
    from spmd_lm.evaluation.harness import HarnessLM

    lm_eval.simple_evaluate(model=HarnessLM("runs/gpt2"), tasks=["lambada_openai"])

Requests are scored by the function that scores `spmd-lm eval`'s own tasks.  In a job of several processes every process
makes the same requests, and gets all results."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from spmd_lm.checkpoints.restored import open_run
from spmd_lm.checkpoints.saved_run import make_run_tokenizer
from spmd_lm.config.load import load_run
from spmd_lm.errors import ConfigError
from spmd_lm.evaluation.continuations import Encoder, continuation_windows
from spmd_lm.evaluation.scoring import Scorer, Windows, sliding_windows
from spmd_lm.evaluation.zero_shot import require_causal
from spmd_lm.generation.generate import Generator
from spmd_lm.generation.sampling import Sampling
from spmd_lm.runtime.devices import set_up_devices

NEW_TOKENS = 256
"""How many generate_until adds where a request does not say."""


class HarnessLM(LM):
    """run: its directory; overrides: section.key=value, as on the command line.  fallback: as of `open_run`.

    Raises ConfigError for a run that is no causal language model."""

    def __init__(self, run: str | Path, overrides: Sequence[str] = (), fallback: bool = False):
        super().__init__()
        config = set_up_devices(load_run(Path(run), overrides))
        require_causal(config)
        self.program, self.params, _ = open_run(config, fallback)
        self.scorer = Scorer(self.program, self.params)
        self.encoder = Encoder(make_run_tokenizer(config), config.model.vocab)
        self.generators: dict[Sampling, Generator] = {}

    @property
    def tokenizer_name(self) -> str:
        """What the harness knows its cached requests by."""
        return getattr(self.program.config.data, "tokenizer", "ids").replace("/", "__")

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Of each (context, continuation): the continuation's log-likelihood in nats, and whether it is the greedy one.

        Raises DataError as `spmd-lm eval` does for its own items."""
        if not requests:
            return []
        items = []
        for i, request in enumerate(requests):
            context, text = request.args
            items.append(self.encoder.continuation(context, text, f"loglikelihood request {i}"))
        scored = self.scorer(continuation_windows(items, self.program.config.model.context)[0])
        return list(zip(scored.window_log_likelihood().tolist(), scored.window_greedy().tolist(), strict=True))

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Of each (text,): the log-likelihood of all its tokens in nats, the first one at the start of a document.

        Windows do not overlap, but for the last one, which is full."""
        context, parts, owner = self.program.config.model.context, [], []
        for i, request in enumerate(requests):
            where = f"loglikelihood_rolling request {i}"
            if len(ids := self.encoder.encode(request.args[0], where)):
                start = self.encoder.document_start(where)
                text = ids if ids[0] == start[0] else np.concatenate([start, ids])
                parts.append(sliding_windows(text, context, context, last_is_full=True))
                owner += [i] * len(parts[-1].start)
        if not parts:
            return [0.0] * len(requests)
        log_likelihood = self.scorer(Windows.concatenate(parts)).window_log_likelihood()
        return np.bincount(owner, log_likelihood, len(requests)).tolist()

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Of each (context, options): the text that follows, up to the first of `until`, the end of the document, or
        max_gen_toks tokens.  Greedy, unless do_sample is true.  Raises ConfigError for an option that is not known."""
        texts = [""] * len(requests)
        options = [parse_options(request.args[1]) for request in requests]
        for sampling in dict.fromkeys(sampling for sampling, _ in options):
            rows = [i for i, (each, _) in enumerate(options) if each == sampling]
            size = self.program.config.train.batch
            for chosen in (rows[i : i + size] for i in range(0, len(rows), size)):
                new_texts = self._continue([requests[i].args[0] for i in chosen], sampling)
                for i, text in zip(chosen, new_texts, strict=True):
                    texts[i] = cut(text, options[i][1])
        return texts

    def _continue(self, contexts: list[str], sampling: Sampling) -> list[str]:
        """What follows each context, at most a batch of them, up to the end of the document."""
        tokenizer, size = self.encoder.tokenizer, self.program.config.train.batch
        generator = self.generators.get(sampling) or Generator(self.program, size, sampling, tokenizer)
        self.generators[sampling] = generator
        prompts = []
        for i, context in enumerate(contexts):
            where = f"generate_until request {i}"
            prompt = self.encoder.document(context, where)
            prompts.append(prompt if len(prompt) else self.encoder.document_start(where))
        new_ids = [ids[len(p) :] for p, ids in zip(prompts, generator.generate(self.params, prompts), strict=True)]
        return [tokenizer.decode(ids[: generator.length(ids)]) for ids in new_ids]


def parse_options(options: Mapping[str, Any]) -> tuple[Sampling, list[str]]:
    """How to sample, and where to stop, from the harness's generation options.  Raises ConfigError."""
    known = {"until", "max_gen_toks", "max_new_tokens", "do_sample", "temperature", "top_k", "top_p"}
    if unknown := [name for name in options if name not in known]:
        raise ConfigError(f"generate_until: unknown option {unknown[0]}. Use {', '.join(sorted(known))}.")
    until = options.get("until") or []
    tokens = int(options.get("max_gen_toks") or options.get("max_new_tokens") or NEW_TOKENS)
    stops = [until] if isinstance(until, str) else list(until)
    if not options.get("do_sample"):
        return Sampling(tokens, greedy=True), stops
    temperature, top_p = float(options.get("temperature", 1)), float(options.get("top_p", 1))
    return Sampling(tokens, temperature, int(options.get("top_k", 0)), top_p), stops


def cut(text: str, stops: Sequence[str]) -> str:
    """The text before the first of `stops` in it."""
    return text[: min((at for stop in stops if stop and (at := text.find(stop)) >= 0), default=len(text))]
