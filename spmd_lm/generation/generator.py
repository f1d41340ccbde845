"""Text from a trained model: prompts in a batch, one cache of keys and values, laid out over devices as the model is.

A row's text depends on (prompt, seed, row) alone: a layout or a neighbour in the batch never changes it."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from spmd_lm.data.tokenizers.tokenizer import make_tokenizer
from spmd_lm.errors import DataError
from spmd_lm.generation.sampling import Sampling
from spmd_lm.parallel.plan import Tree
from spmd_lm.step.eval_step import inference_params
from spmd_lm.step.program import Program

DEFAULT = Sampling()


def filter_logits(logits: jax.Array, top_k: int, top_p: float) -> jax.Array:
    """logits [batch, vocab] with -inf where a token is not among the `top_k` likeliest, or not needed to reach
    `top_p`."""
    if not top_k and top_p >= 1:
        return logits
    ranked = jnp.sort(logits, axis=-1, descending=True)
    floor = ranked[:, min(top_k or logits.shape[-1], logits.shape[-1]) - 1, None]
    if top_p < 1:
        kept = jnp.where(ranked >= floor, ranked, -jnp.inf)
        share = jax.nn.softmax(kept, axis=-1)
        needed = jnp.cumsum(share, axis=-1) - share < top_p
        floor = jnp.min(jnp.where(needed, ranked, ranked[:, :1]), axis=-1, keepdims=True)  # the first always is
    return jnp.where(logits >= floor, logits, -jnp.inf)


def draw_token(logits: jax.Array, row: jax.Array, drawn: jax.Array, sampling: Sampling) -> jax.Array:
    """The next token of each row, int32 [batch].  row: each one's number, int32 [batch]; drawn: tokens drawn so far."""
    if sampling.greedy or sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = filter_logits(logits / sampling.temperature, sampling.top_k, sampling.top_p)
    key = jax.random.fold_in(jax.random.key(sampling.seed), drawn)
    draw = lambda logits, row: jax.random.categorical(jax.random.fold_in(key, row), logits)  # noqa: E731
    return jax.vmap(draw)(logits, row).astype(jnp.int32)


def window(length: int, context: int) -> int:
    """How many tokens, counted from its end, the model reads of a text of `length` tokens.

    All of them up to `context`; then it goes on from the later half, because positions are learned and a cache cannot
    slide."""
    half = context // 2 or 1
    return length if length <= context else half + (length - context - 1) % (context + 1 - half)


class Generator:
    """A model, ready to read and write text in batches of `rows` sequences."""

    def __init__(self, program: Program, rows: int, sampling: Sampling):
        shards = program.plan.layout.batch_shards
        self.program, self.sampling = program, sampling
        self.rows = -(-rows // shards) * shards

    @functools.cached_property
    def _write(self):
        """(params, tokens [rows, context + 1], lengths [rows], row [rows], drawn, count) -> tokens with `count` more in
        each row."""
        program, sampling = self.program, self.sampling
        plan, model, dtype = program.plan, program.model, jnp.dtype(program.config.precision.compute)

        def body(params: Tree, tokens, lengths, row, drawn, count):
            inference, gather = inference_params(model, plan, params, dtype)
            extend = functools.partial(model.extend, inference, gather)
            here = jnp.arange(tokens.shape[0], dtype=jnp.int32)
            start = tokens[:, :-1]
            places = jnp.broadcast_to(jnp.arange(start.shape[1], dtype=jnp.int32), start.shape)
            logits, cache = extend(model.empty_cache(start.shape[0], dtype), start, places, lengths - 1)

            def more(i, carry):
                tokens, logits, cache = carry
                new = draw_token(logits, row, drawn + i, sampling)
                at = lengths + i
                tokens = tokens.at[here, at].set(new)
                return tokens, *extend(cache, new[:, None], at[:, None], jnp.zeros_like(at))

            # The last token drawn is never read: nothing is asked after it.
            tokens, logits, _ = jax.lax.fori_loop(0, count - 1, more, (tokens, logits, cache))
            last = draw_token(logits, row, drawn + count - 1, sampling)
            return tokens.at[here, lengths + count - 1].set(last)

        rows = self._rows
        write = plan.shard_map(body, (plan.param_specs, rows, rows, rows, P(), P()), rows, whole_sequence=True)
        return jax.jit(write, out_shardings=plan.sharding(P()))  # whole, so that every process can read it

    @property
    def _rows(self) -> P:
        return P(self.program.plan.activation_rules.axes("batch"))

    def extend(self, params: Tree, prompts: list[np.ndarray]) -> list[np.ndarray]:
        """Each prompt (token ids, at least one) with `sampling.tokens` more."""
        context = self.program.config.model.context
        texts = [np.asarray(p, np.int32) for p in prompts]
        put = lambda x, spec: jax.device_put(x, self.program.plan.sharding(spec))  # noqa: E731
        drawn = 0
        while drawn < self.sampling.tokens:
            ends = [t[-window(len(t), context) :] for t in texts]
            count = min(self.sampling.tokens - drawn, context + 1 - max(map(len, ends)))
            tokens, lengths = np.zeros((self.rows, context + 1), np.int32), np.ones(self.rows, np.int32)
            for i, t in enumerate(ends):
                tokens[i, : len(t)], lengths[i] = t, len(t)
            row = np.arange(self.rows, dtype=np.int32)
            out = self._write(
                params,
                *(put(x, self._rows) for x in (tokens, lengths, row)),
                *(put(np.int32(x), P()) for x in (drawn, count)),
            )
            out = np.asarray(out)
            new = [out[i, len(t) : len(t) + count] for i, t in enumerate(ends)]
            texts = [np.concatenate(pair) for pair in zip(texts, new, strict=True)]
            drawn += count
        return texts


def sample_text(program: Program, params: Tree, prompts: Sequence[str], sampling: Sampling = DEFAULT) -> list[str]:
    """Each prompt and what the model adds to it, up to the end of a document.  An empty prompt begins a document.

    DataError for a prompt without a token, where nothing says how a text begins."""
    tokenizer = make_tokenizer(program.config.data)
    start = np.array([] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id], np.int32)
    ids = [np.concatenate([start, np.asarray(tokenizer.encode(p), np.int32)]) for p in prompts]
    vocab = program.config.model.vocab
    for prompt, tokens in zip(prompts, ids, strict=True):
        if not tokens.size:
            raise DataError(
                "an empty prompt: this run has no token that begins a text. Give one, as in --prompt '3 1'."
            )
        if tokens.max() >= vocab:
            raise DataError(f"prompt {prompt!r:.60}: token {tokens.max()} is not below model.vocab={vocab}.")
    written = Generator(program, len(ids), sampling).extend(params, ids)

    def text(ids: np.ndarray, prompt: np.ndarray) -> str:
        ends = np.flatnonzero(ids[len(prompt) :] == tokenizer.eos_token_id)
        return tokenizer.decode(ids[len(start) : len(prompt) + ends[0] if len(ends) else None])

    return [text(*pair) for pair in zip(written, ids, strict=True)]
