"""Generated text does not depend on the KV cache, batch or layout, and continues past the context."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_lm.data.tokenizers.tokenizer import ByteTokenizer
from spmd_lm.errors import ConfigError, NonFiniteError
from spmd_lm.generation.generate import (
    Generator,
    filter_logits,
    generate_run,
    generate_text,
    sample_token,
    window_length,
)
from spmd_lm.generation.sampling import Sampling
from tests import reference
from tests.helpers import FLOAT32, canonical, make_config, program, run_of

R = np.random.default_rng(0)
CONTEXT, VOCAB = 16, 61
PROMPTS = [R.integers(0, VOCAB, n).astype(np.int32) for n in (1, 5, 15, 16, 40)]


def scaled_up(tree):
    """Parameters whose logits differ; those of a fresh model are all but equal."""
    return jax.tree.map(lambda p: p * 8, tree)


@functools.cache
def generator(layout: str, rows: int, **sampling) -> Generator:
    return Generator(program(run_of(layout)), rows, Sampling(**sampling))


@functools.cache
def params(layout: str):
    return scaled_up(program(run_of(layout)).init().params)


def generate(layout, prompts, **sampling):
    return generator(layout, len(PROMPTS), **sampling).generate(params(layout), prompts)


@functools.cache
def reference_argmax():
    """A function (text [1, context], its length) -> the reference model's likeliest next token."""
    p = program(run_of("one"))
    weights, c = jax.tree.map(jnp.asarray, scaled_up(canonical(p, p.init()).params)), p.config.model
    return jax.jit(lambda text, length: jnp.argmax(reference.logits(weights, c, text)[0, length - 1]))


def generated_without_cache(prompt, tokens):
    """Greedy: one forward pass over the whole window per token."""
    text = list(prompt)
    for _ in range(tokens):
        end = text[-window_length(len(text), CONTEXT) :]
        text.append(int(reference_argmax()(np.array([end + [0] * (CONTEXT - len(end))], np.int32), len(end))))
    return text


@pytest.mark.parametrize("layout", ["one", "data4-model2"])
def test_greedy_text_equals_that_of_full_forward_passes(layout, x64):
    """Prompts of several lengths in one batch; the context is filled several times."""
    for got, prompt in zip(generate(layout, PROMPTS, tokens=40, greedy=True), PROMPTS, strict=True):
        assert got.tolist() == generated_without_cache(prompt, 40)


SHARDED = pytest.param("replica2-data2-model2-sequence-zero3", marks=[pytest.mark.mutants, pytest.mark.slow])


@pytest.mark.parametrize("layout", ["data4-model2", pytest.param("model8", marks=pytest.mark.slow), SHARDED])
def test_every_layout_samples_the_same_text(layout, x64):
    got, want = (generate(where, PROMPTS, tokens=30, seed=1) for where in (layout, "one"))
    assert [text.tolist() for text in got] == [text.tolist() for text in want]
    assert max(map(max, want)) < VOCAB  # padding of the vocabulary is never sampled


def test_logits_that_are_no_numbers_are_told(x64):
    broken = jax.tree.map(lambda x: x * np.nan, params("one"))
    with pytest.raises(NonFiniteError, match=r"logits are NaN. Use an earlier checkpoint."):
        generator("one", 1, tokens=4, greedy=True).generate(broken, [np.array([1, 2])])


def test_a_row_does_not_depend_on_its_neighbours(x64):
    """A row's index counts: the same prompt twice in a batch gives two texts."""
    together = generate("one", PROMPTS, tokens=30, seed=1)
    for i, prompt in enumerate(PROMPTS):
        others = [PROMPTS[0]] * i
        assert generate("one", [*others, prompt], tokens=30, seed=1)[i].tolist() == together[i].tolist()
    first, second = generate("one", [PROMPTS[0]] * 2, tokens=30, seed=1)
    assert first.tolist() != second.tolist()


def test_seeds_give_different_texts(x64):
    texts = [generate("one", PROMPTS[1:2], tokens=30, seed=seed)[0].tolist() for seed in (1, 2)]
    assert texts[0] != texts[1]


def test_rows_are_padded_to_the_batch_shards(x64):
    assert generator("data4-model2", len(PROMPTS), tokens=40, greedy=True).rows == 8


@pytest.mark.parametrize("context", [1, 2, 3, 16, 17])
def test_a_window_grows_to_the_context_and_restarts_from_half(context):
    assert [window_length(n, context) for n in range(1, context + 1)] == [*range(1, context + 1)]
    for n in range(context, 6 * context):
        full = window_length(n, context) == context
        assert window_length(n + 1, context) == ((context // 2 or 1) if full else window_length(n, context) + 1)


LOGITS = R.normal(size=(4, 50)).astype(np.float32) * 3
LOGITS[:, 7] = LOGITS[:, 3]  # a tie


def kept_by_sorted_search(z, top_k, top_p):
    """The smallest set of likeliest tokens, and whatever ties with its last."""
    order = np.argsort(-z, kind="stable")[: top_k or None]
    order = order[z[order] >= z[order[-1]]]
    p = np.exp(z[order] - z.max())
    p /= p.sum()
    last = order[min(np.searchsorted(np.cumsum(p), top_p), len(order) - 1)]
    return z >= z[last]


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(0, 1.0), (1, 1.0), (5, 1.0), (0, 0.7), (10, 0.5), (100, 0.99), (0, 1e-9), (0, 1e-50)]
)
def test_filters_keep_the_likeliest_tokens(top_k, top_p):
    got = np.asarray(filter_logits(jnp.asarray(LOGITS), top_k, top_p))
    for row, z in zip(got, LOGITS, strict=True):
        np.testing.assert_array_equal(row, np.where(kept_by_sorted_search(z, top_k, top_p), z, -np.inf))


def samples(sampling, count=2000):
    sample = jax.vmap(lambda i: sample_token(jnp.asarray(LOGITS), jnp.arange(4), i, sampling))
    return np.asarray(sample(jnp.arange(count)))


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(greedy=True),
        Sampling(temperature=0.0),
        Sampling(top_k=1),
        Sampling(top_p=1e-9),
        Sampling(temperature=1e-5),
        Sampling(temperature=1e-6, top_k=5, top_p=0.9),
    ],
    ids=str,
)
def test_greedy_options(sampling):
    assert (samples(sampling, 20) == LOGITS.argmax(-1)).all()


@pytest.mark.parametrize("temperature", [1e-6, 1.0, 1e3, 1e6])
@pytest.mark.parametrize("filters", [{}, {"top_k": 99}, {"top_p": 0.999}, {"top_k": 7, "top_p": 1e-9}], ids=str)
def test_what_has_no_text_is_never_sampled(temperature, filters):
    """Their logits are -inf."""
    logits = jnp.asarray(LOGITS).at[:, 3:].set(-jnp.inf)
    sampling = Sampling(temperature=temperature, **filters)
    assert all((sample_token(logits, jnp.arange(4), i, sampling) < 3).all() for i in range(5))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=2.0), Sampling(top_k=5, seed=3)], ids=str)
def test_tokens_are_sampled_as_often_as_they_are_likely(sampling):
    sampled = samples(sampling)
    for row in range(4):
        z = LOGITS[row] / sampling.temperature
        p = np.exp(z) * kept_by_sorted_search(z, sampling.top_k, sampling.top_p)
        p /= p.sum()
        share = np.bincount(sampled[:, row], minlength=50) / len(sampled)
        assert (share[p == 0] == 0).all()
        assert (np.abs(share - p) <= 5 * np.sqrt(p * (1 - p) / len(sampled)) + 2e-3).all()


def test_a_model_that_is_not_causal_is_refused():
    config = make_config()
    bert = config.model_copy(update={"model": config.model.model_copy(update={"kind": "bert"})})
    message = r"model\.kind=bert predicts masked tokens.* Generate from a run with model\.kind=gpt"
    with pytest.raises(ConfigError, match=message):
        generate_run(bert, [""], Sampling())


def test_a_text_ends_at_the_end_of_its_document(monkeypatch):
    added = [b"lo\0next", b" is all", b"\0"]

    def generate(self, params, prompts):
        assert [p.tolist() for p in prompts] == [[0, *b"hel"], [0, *"ä".encode()], [0]]
        return [np.concatenate([p, list(new)]) for p, new in zip(prompts, added, strict=True)]

    monkeypatch.setattr(Generator, "generate", generate)
    text = make_config(data={"source": "python-stdlib"}, model={"vocab": 256}, precision=FLOAT32)
    assert generate_text(program(text), None, ["hel", "ä", ""], Sampling()) == ["hello", "ä is all", ""]


def test_a_text_without_an_end_runs_to_its_length(monkeypatch):
    monkeypatch.setattr(Generator, "generate", lambda self, params, prompts: [np.array([*p, 7, 8]) for p in prompts])
    text = make_config(data={"source": "synthetic"}, precision=FLOAT32)
    assert generate_text(program(text), None, ["3 1"], Sampling(tokens=2)) == ["3 1 7 8"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 0}, "tokens=0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": 1e-50}, "temperature=1e-50"),  # 0 in float32: logits over it are not finite
        *(({"temperature": hot}, "or 1e-6 to 1e6") for hot in (1.1e6, 1e38, 3e38, 1e39, 1e300, math.inf, math.nan)),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**32}, "seed=4294967296"),  # would be seed 0
        ({"top_k": -1}, "top_k=-1"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.5, "tokens": 0}, "top_p=1.5"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message) as error:
        Sampling(**options)
    assert len(error.value.problems) == len(options)


class Padded(ByteTokenizer):
    """Knows every third id alone, though the model has all."""

    def has_text(self, count: int) -> np.ndarray:
        return np.arange(count) % 3 == 1


@pytest.mark.parametrize("layout", ["one", pytest.param("data4-model2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("sampling", [{"greedy": True}, {"seed": 3}, {"temperature": 50.0}, {"top_k": 4, "top_p": 0.9}])
def test_what_the_tokenizer_has_no_token_for_is_never_sampled(layout, sampling, x64):
    """The separator of documents, 0, may end a text."""
    each = Generator(program(run_of(layout)), len(PROMPTS), Sampling(tokens=20, **sampling), Padded())
    for prompt, ids in zip(PROMPTS, each.generate(params(layout), PROMPTS), strict=True):
        new = ids[len(prompt) :]
        assert {*new[new > 0].tolist()} <= {*range(1, VOCAB, 3)}
