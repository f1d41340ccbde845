"""A cache, a batch, a layout and a full context change nothing of what a model writes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_lm.errors import ConfigError
from spmd_lm.generation.generate import generate_run
from spmd_lm.generation.generator import Generator, draw_token, filter_logits, sample_text, window
from spmd_lm.generation.sampling import Sampling
from tests import reference
from tests.helpers import FLOAT32, canonical, make_config, program, run_of

R = np.random.default_rng(0)
CONTEXT, VOCAB = 16, 61
PROMPTS = [R.integers(0, VOCAB, n).astype(np.int32) for n in (1, 5, 15, 16, 40)]


def loud(tree):
    """As drawn at first, a model is all but indifferent between tokens."""
    return jax.tree.map(lambda p: p * 8, tree)


@functools.cache
def generator(layout: str, rows: int, **sampling) -> Generator:
    return Generator(program(run_of(layout)), rows, Sampling(**sampling))


@functools.cache
def params(layout: str):
    return loud(program(run_of(layout)).init().params)


def write(layout, prompts, **sampling):
    return generator(layout, len(PROMPTS), **sampling).extend(params(layout), prompts)


@functools.cache
def likeliest():
    """Text [1, context] and its length -> the token that the reference finds likeliest next."""
    p = program(run_of("one"))
    weights, c = jax.tree.map(jnp.asarray, loud(canonical(p, p.init()).params)), p.config.model
    return jax.jit(lambda text, length: jnp.argmax(reference.logits(weights, c, text)[0, length - 1]))


def by_hand(prompt, tokens):
    """Reads all that the model may see again for every token."""
    text = list(prompt)
    for _ in range(tokens):
        end = text[-window(len(text), CONTEXT) :]
        text.append(int(likeliest()(np.array([end + [0] * (CONTEXT - len(end))], np.int32), len(end))))
    return text


@pytest.mark.parametrize("layout", ["one", "data4-model2"])
def test_greedy_text_is_what_full_forward_passes_give(layout, x64):
    """Prompts of many lengths in one batch, the context filled several times over."""
    for got, prompt in zip(write(layout, PROMPTS, tokens=40, greedy=True), PROMPTS, strict=True):
        assert got.tolist() == by_hand(prompt, 40)


SHARDED = pytest.param("replica2-data2-model2-sequence-zero3", marks=pytest.mark.mutants)


@pytest.mark.parametrize("layout", ["data4-model2", "model8", SHARDED])
def test_every_layout_draws_the_same_text(layout, x64):
    got, want = (write(where, PROMPTS, tokens=30, seed=1) for where in (layout, "one"))
    assert [text.tolist() for text in got] == [text.tolist() for text in want]
    assert max(map(max, want)) < VOCAB  # padding is never drawn


def test_a_row_does_not_depend_on_its_neighbours(x64):
    """But on its place: the same prompt twice in a batch gives two texts."""
    together = write("one", PROMPTS, tokens=30, seed=1)
    for i, prompt in enumerate(PROMPTS):
        others = [PROMPTS[0]] * i
        assert write("one", [*others, prompt], tokens=30, seed=1)[i].tolist() == together[i].tolist()
    first, second = write("one", [PROMPTS[0]] * 2, tokens=30, seed=1)
    assert first.tolist() != second.tolist()


def test_a_seed_is_a_text(x64):
    texts = [write("one", PROMPTS[1:2], tokens=30, seed=seed)[0].tolist() for seed in (1, 2)]
    assert texts[0] != texts[1]


def test_rows_are_filled_up_to_the_layout_s(x64):
    assert generator("data4-model2", len(PROMPTS), tokens=40, greedy=True).rows == 8


@pytest.mark.parametrize("context", [1, 2, 3, 16, 17])
def test_a_window_grows_to_the_context_and_goes_on_from_its_half(context):
    assert [window(n, context) for n in range(1, context + 1)] == [*range(1, context + 1)]
    for n in range(context, 6 * context):
        full = window(n, context) == context
        assert window(n + 1, context) == ((context // 2 or 1) if full else window(n, context) + 1)


LOGITS = R.normal(size=(4, 50)).astype(np.float32) * 3
LOGITS[:, 7] = LOGITS[:, 3]  # a tie


def kept_by_hand(z, top_k, top_p):
    """The least set that a sorted walk takes, and whatever ties with its last."""
    order = np.argsort(-z, kind="stable")[: top_k or None]
    order = order[z[order] >= z[order[-1]]]
    p = np.exp(z[order] - z.max())
    p /= p.sum()
    last = order[min(np.searchsorted(np.cumsum(p), top_p), len(order) - 1)]
    return z >= z[last]


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(0, 1.0), (1, 1.0), (5, 1.0), (0, 0.7), (10, 0.5), (100, 0.99), (0, 1e-9), (0, 1e-50)]
)
def test_filters_keep_what_a_sorted_walk_keeps(top_k, top_p):
    got = np.asarray(filter_logits(jnp.asarray(LOGITS), top_k, top_p))
    for row, z in zip(got, LOGITS, strict=True):
        np.testing.assert_array_equal(row, np.where(kept_by_hand(z, top_k, top_p), z, -np.inf))


def draws(sampling, count=2000):
    draw = jax.vmap(lambda i: draw_token(jnp.asarray(LOGITS), jnp.arange(4), i, sampling))
    return np.asarray(draw(jnp.arange(count)))


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
def test_ways_to_take_the_likeliest(sampling):
    assert (draws(sampling, 20) == LOGITS.argmax(-1)).all()


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=2.0), Sampling(top_k=5, seed=3)], ids=str)
def test_tokens_are_drawn_as_often_as_they_are_likely(sampling):
    drawn = draws(sampling)
    for row in range(4):
        z = LOGITS[row] / sampling.temperature
        p = np.exp(z) * kept_by_hand(z, sampling.top_k, sampling.top_p)
        p /= p.sum()
        share = np.bincount(drawn[:, row], minlength=50) / len(drawn)
        assert (share[p == 0] == 0).all()
        assert (np.abs(share - p) <= 5 * np.sqrt(p * (1 - p) / len(drawn)) + 2e-3).all()


def test_a_model_that_reads_both_ways_writes_nothing():
    config = make_config()
    both = config.model_copy(update={"model": config.model.model_copy(update={"kind": "bert"})})
    with pytest.raises(
        ConfigError, match=r"model\.kind=bert fills in hidden words.* Generate from a run of model\.kind"
    ):
        generate_run(both, [""], Sampling())


def test_a_text_ends_where_its_document_does(monkeypatch):
    added = [b"lo\0next", b" is all", b"\0"]

    def extend(self, params, prompts):
        assert [p.tolist() for p in prompts] == [[0, *b"hel"], [0, *"ä".encode()], [0]]
        return [np.concatenate([p, list(new)]) for p, new in zip(prompts, added, strict=True)]

    monkeypatch.setattr(Generator, "extend", extend)
    text = make_config(data={"source": "python-stdlib"}, model={"vocab": 256}, precision=FLOAT32)
    assert sample_text(program(text), None, ["hel", "ä", ""], Sampling()) == ["hello", "ä is all", ""]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"tokens": 0}, "tokens=0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": 1e-50}, "temperature=1e-50"),  # 0 in float32: logits over it are not finite
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**32}, "seed=4294967296"),  # would be seed 0
        ({"top_k": -1}, "top_k=-1"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.5, "tokens": 0}, "top_p=1.5"),
    ],
)
def test_wrong_sampling_is_refused(wrong, said):
    with pytest.raises(ConfigError, match=said) as error:
        Sampling(**wrong)
    assert len(error.value.problems) == len(wrong)
