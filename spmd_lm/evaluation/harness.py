"""A run as a model of the EleutherAI harness (the extra `lm-eval`), for the harness's tasks.

    import lm_eval
    from spmd_lm.evaluation.harness import HarnessLM

    lm_eval.simple_evaluate(model=HarnessLM("runs/gpt2"), tasks=["lambada_openai"])

Requests are scored by the scorer of `spmd-lm eval`.  Every process of a job makes the same requests, and gets all
results."""

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

NEW_TOKENS = 256  # generate_until's default


class HarnessLM(LM):
    """run: the run's directory.
    overrides: section.key=value, as on the command line.
    fallback: as for `open_run`.

    Raises ConfigError for a run that is not a causal language model."""

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
        """The harness's key for cached requests."""
        return getattr(self.program.config.data, "tokenizer", "ids").replace("/", "__")

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Log-likelihood in nats of each (context, continuation)'s continuation, and whether it is the greedy one.
        Raises DataError like `spmd-lm eval`."""
        if not requests:
            return []
        items = []
        for i, request in enumerate(requests):
            context, text = request.args
            items.append(self.encoder.continuation(context, text, f"loglikelihood request {i}"))
        scored = self.scorer(continuation_windows(items, self.program.config.model.context)[0])
        return list(zip(scored.window_log_likelihood().tolist(), scored.window_greedy().tolist(), strict=True))

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Log-likelihood in nats of all tokens of each (text,), the first after the token that starts a document.
        Windows do not overlap, except for the last one, which is full."""
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
        """Continues each (context, options), up to the first of `until`, the end of the document, or max_gen_toks
        tokens.  Greedy, unless do_sample is true.  Raises ConfigError for an unknown option."""
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
        """Generates after each context, at most a batch of them, up to the end of the document."""
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
    """Sampling and stop texts, from the harness's generation options.  Raises ConfigError."""
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
