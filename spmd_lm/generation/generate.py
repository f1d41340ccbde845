"""Text generation: prompts are tokenized, continued with a KV cache in batches sharded like the model, and decoded.

A row's text depends on (prompt, seed, row) alone, not on the layout or on other rows.  The batch dimension is prompts,
padded to a multiple of the layout's batch shards."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from spmd_lm.checkpoints.restored import open_run
from spmd_lm.checkpoints.saved_run import make_run_tokenizer
from spmd_lm.config.load import TOKENIZER_DIR
from spmd_lm.config.schema import RunConfig
from spmd_lm.data.tokenizers.tokenizer import Tokenizer, begin, check_ids
from spmd_lm.data.tokenizers.vocabulary import read_end_ids
from spmd_lm.errors import ConfigError, DataError, NonFiniteError
from spmd_lm.generation.sampling import Sampling
from spmd_lm.parallel.trees import Tree
from spmd_lm.runtime.compiler_workarounds import exclusive_first_call
from spmd_lm.step.program import Program


def generate_run(
    config: RunConfig,
    prompts: Sequence[str],
    sampling: Sampling,
    fallback: bool = False,
    opened: tuple[Program, Tree] | None = None,
) -> list[str]:
    """`generate_text` with a run's newest checkpoint, or with `opened`.  fallback: as for `open_run`.  Raises
    ConfigError for a model that is not causal."""
    require_generative(config)
    program, params = opened or open_run(config, fallback)[:2]
    return generate_text(program, params, prompts, sampling, make_run_tokenizer(config))


def require_generative(config: RunConfig) -> None:
    """Raises ConfigError for a model that is not causal."""
    if not config.model.causal:
        raise ConfigError(
            f"{config.run.directory}: model.kind={config.model.kind} predicts masked tokens and cannot generate text. "
            "Generate from a run with model.kind=gpt."
        )


def generate_text(
    program: Program, params: Tree, prompts: Sequence[str], sampling: Sampling, tokenizer: Tokenizer | None = None
) -> list[str]:
    """Prompts with their continuations, up to the end of the document or sampling.tokens new tokens.  An empty prompt
    starts a document.  Raises DataError like `encode_prompt` and `end_token_ids`.
    tokenizer: of the run's data; read again if None."""
    config = program.config
    tokenizer = tokenizer or make_run_tokenizer(config)
    prompt_ids = [encode_prompt(tokenizer, prompt, config.model.vocab) for prompt in prompts]
    texts = []
    generator = Generator(program, len(prompts), sampling, tokenizer)
    for prompt, begun, ids in zip(prompts, prompt_ids, generator.generate(params, prompt_ids), strict=True):
        added = len(begun) - len(tokenizer.encode(prompt))
        texts.append(tokenizer.decode(ids[added : len(begun) + generator.length(ids[len(begun) :])]))
    return texts


def end_token_ids(config: RunConfig, tokenizer: Tokenizer) -> list[int]:
    """Ids that end a text: the separator of documents, and those in an imported model's own files."""
    own = read_end_ids(config.run.directory / TOKENIZER_DIR)
    return sorted({*own, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])})


def encode_prompt(tokenizer: Tokenizer, prompt: str, vocab: int) -> np.ndarray:
    """Token ids of a prompt, after the one that starts a document, int64.  Raises DataError for a token outside the
    vocabulary, and for an empty prompt if no token starts a document."""
    ids = begin(tokenizer, tokenizer.encode(prompt).astype(np.int64), prompt=True)
    if not ids.size and tokenizer.bos_token_id is not None:
        ids = np.array([tokenizer.bos_token_id], np.int64)
    if not ids.size:
        raise DataError(
            "an empty prompt: this run's tokenizer has no token to start a document with. Give a prompt, as in "
            "--prompt '3 1'."
        )
    check_ids(ids, vocab, f"prompt {prompt!r:.60}")
    return ids


def filter_logits(logits: jax.Array, top_k: int, top_p: float) -> jax.Array:
    """Sets logits [batch, vocab] to -inf except for the `top_k` likeliest tokens, and among these the likeliest whose
    probabilities sum to `top_p`.  Ties with the last kept token are kept."""
    if not top_k and top_p >= 1:
        return logits
    sorted_logits = jnp.sort(logits, axis=-1, descending=True)
    vocab = logits.shape[-1]
    threshold = sorted_logits[:, min(top_k or vocab, vocab) - 1, None]
    if top_p < 1:
        probs = jax.nn.softmax(jnp.where(sorted_logits >= threshold, sorted_logits, -jnp.inf), axis=-1)
        in_nucleus = jnp.cumsum(probs, axis=-1) - probs < top_p
        # The likeliest token is always kept, also where top_p is 0 in float32.
        threshold = jnp.min(jnp.where(in_nucleus, sorted_logits, sorted_logits[:, :1]), axis=-1, keepdims=True)
    return jnp.where(logits >= threshold, logits, -jnp.inf)


def mask_logits(logits: jax.Array, allowed: np.ndarray) -> jax.Array:
    """Sets logits [.., vocab] of disallowed ids to -inf.  allowed: bool, without the layout's padding."""
    padded = np.pad(allowed, (0, logits.shape[-1] - len(allowed)))
    return logits if allowed.all() else jnp.where(padded, logits, -jnp.inf)


def sample_token(logits: jax.Array, rows: jax.Array, index: jax.Array, sampling: Sampling) -> jax.Array:
    """The next token of each row, int32 [batch].

    logits: [batch, vocab].
    rows: row indices in the global batch, int32 [batch].
    index: the new token's, from 0 after the prompt; keys the random draw, with the seed and the row."""
    if sampling.greedy or sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = filter_logits(logits / sampling.temperature, sampling.top_k, sampling.top_p)
    key = jax.random.fold_in(jax.random.key(sampling.seed), index)

    def sample_row(logits: jax.Array, row: jax.Array) -> jax.Array:
        return jax.random.categorical(jax.random.fold_in(key, row), logits)

    return jax.vmap(sample_row)(logits, rows).astype(jnp.int32)


def window_length(length: int, context: int) -> int:
    """Number of a text's last tokens that the model reads: all, up to `context`.  A longer text restarts from its last
    half context, and the window grows to `context` again: a KV cache cannot slide under learned positions."""
    shortest = context // 2 or 1
    return length if length <= context else shortest + (length - context - 1) % (context + 1 - shortest)


class Generator:
    """A model and its sampling options, compiled for batches of `rows` prompts.
    tokenizer: restricts sampling to its tokens, and gives those that end a text; None: all ids of the model."""

    def __init__(self, program: Program, rows: int, sampling: Sampling, tokenizer: Tokenizer | None = None):
        shards = program.plan.layout.batch_shards
        self.program, self.sampling = program, sampling
        self.rows = -(-rows // shards) * shards
        self.ends, self.allowed = list[int](), np.ones(program.config.model.vocab, bool)
        if tokenizer:
            self.ends = end_token_ids(program.config, tokenizer)
            self.allowed = tokenizer.has_text(len(self.allowed))
            self.allowed[[end for end in self.ends if end < len(self.allowed)]] = True

    def length(self, new_ids: np.ndarray) -> int:
        """Number of ids before the first one that ends a text."""
        return int(np.argmax([*np.isin(new_ids, self.ends), True]))

    def generate(self, params: Tree, prompts: list[np.ndarray]) -> list[np.ndarray]:
        """Extends each prompt, of at least one token id, by `sampling.tokens` ids, int32."""
        context = self.program.config.model.context
        texts = [np.asarray(prompt, np.int32) for prompt in prompts]
        generated = 0
        while generated < self.sampling.tokens:
            windows = [text[-window_length(len(text), context) :] for text in texts]
            # The longest window fills the cache; the last generated token need not be in it.
            count = min(self.sampling.tokens - generated, context + 1 - max(map(len, windows)))
            new_tokens = self._extend_windows(params, windows, generated, count)
            texts = [np.concatenate([text, new]) for text, new in zip(texts, new_tokens, strict=True)]
            generated += count
        return texts

    def _extend_windows(self, params: Tree, windows: list[np.ndarray], generated: int, count: int) -> list[np.ndarray]:
        """`count` new tokens for each window, after `generated` ones; one prefill."""
        plan = self.program.plan
        tokens = np.zeros((self.rows, self.program.config.model.context + 1), np.int32)
        lengths = np.ones(self.rows, np.int32)
        for i, window in enumerate(windows):
            tokens[i, : len(window)], lengths[i] = window, len(window)
        rows = np.arange(self.rows, dtype=np.int32)
        by_row = jax.device_put((tokens, lengths, rows), plan.sharding(self._batch_spec))
        replicated = jax.device_put((np.int32(generated), np.int32(count)), plan.sharding(P()))
        tokens, is_nan = map(np.asarray, self._prefill_and_decode(params, *by_row, *replicated))
        if is_nan[: len(windows)].any():
            raise NonFiniteError(f"{self.program.config.run.directory}: logits are NaN. Use an earlier checkpoint.")
        return [tokens[i, len(window) : len(window) + count] for i, window in enumerate(windows)]

    @functools.cached_property
    def _prefill_and_decode(self):
        """(params, tokens [batch, context + 1], lengths [batch], rows [batch], generated, count) -> tokens extended by
        `count` in each row, and a mask of rows with NaN logits [batch]."""
        program, sampling, allowed = self.program, self.sampling, self.allowed
        plan, model, dtype = program.plan, program.model, jnp.dtype(program.config.precision.compute)

        def body(params: Tree, tokens, lengths, rows, generated, count):
            weights, gather_layer = program.inference_params(params)
            read = functools.partial(model.extend, weights, gather_layer)
            local_rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)
            prompts = tokens[:, :-1]
            positions = jnp.broadcast_to(jnp.arange(prompts.shape[1], dtype=jnp.int32), prompts.shape)
            logits, cache = read(model.empty_cache(prompts.shape[0], dtype), prompts, positions, lengths - 1)

            def decode_step(i, carry):
                tokens, logits, cache, is_nan = carry
                new = sample_token(mask_logits(logits, allowed), rows, generated + i, sampling)
                position = lengths + i
                tokens = tokens.at[local_rows, position].set(new)
                logits, cache = read(cache, new[:, None], position[:, None], jnp.zeros_like(position))
                return tokens, logits, cache, is_nan | jnp.isnan(logits).any(-1)

            # The last token is sampled outside the loop: the model need not read it.
            carry = tokens, logits, cache, jnp.isnan(logits).any(-1)
            tokens, logits, _, is_nan = jax.lax.fori_loop(0, count - 1, decode_step, carry)
            last = sample_token(mask_logits(logits, allowed), rows, generated + count - 1, sampling)
            return tokens.at[local_rows, lengths + count - 1].set(last), is_nan

        batch = self._batch_spec
        specs = plan.param_specs, batch, batch, batch, P(), P()
        sharded = plan.shard_map(body, specs, (batch, batch), whole_rows=True)
        replicated, options = plan.sharding(P()), program.xla_options.deterministic  # every process can read it
        return exclusive_first_call(jax.jit(sharded, out_shardings=replicated, compiler_options=options))

    @property
    def _batch_spec(self) -> P:
        return P(self.program.plan.axis_rules.axes("batch"))
