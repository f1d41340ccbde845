import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_lm.ops.attention import attention, attention_with_cache
from spmd_lm.ops.attention_spec import AttentionSpec, unmasked_scores
from spmd_lm.ops.dense_attention import query_blocks
from spmd_lm.ops.dropout import DropoutKey
from spmd_lm.ops.rotary import Rotary
from tests import reference
from tests.helpers import over_model, relative

HEADS, WIDTH = 8, 32
ALL = AttentionSpec(HEADS, HEADS)


def inputs(time, rows=2, width=WIDTH):
    return np.random.default_rng(0).normal(size=(4, rows, time, width))


def documents(time, rows=2):
    """Segment ids, int32 [rows, time]; every row is cut elsewhere."""
    cuts = np.random.default_rng(1).integers(0, 5, (rows, time)) == 0
    return np.cumsum(cuts, axis=1, dtype=np.int32)


def with_gradients(f):
    """(q, k, v, g) -> f(q, k, v) and its product with g from the left, by q, k and v."""

    def run(q, k, v, g):
        out, back = jax.vjp(f, q, k, v)
        return out, *back(g)

    return run


def check(got, want, tolerance=1e-13):
    """Compares relative to the largest of all: at a single position the gradients of q and k are zero."""
    got, want = (np.stack(list(map(np.asarray, xs))) for xs in (got, want))
    assert relative(got, want) < tolerance


@pytest.mark.parametrize(
    ("time", "packed"), [(1, False), (7, True), (126, False), (128, False), (128, True), (129, False), (130, True)]
)
def test_xla_attention_is_the_naive_one(time, packed, x64):
    """An even number of positions, from 128 on, is computed in two blocks."""
    segments = documents(time) if packed else None

    def ours(q, k, v):
        return attention(q, k, v, ALL, segment_ids=segments)

    def naive(q, k, v):
        return reference.attention(q, k, v, HEADS, segments)

    check(*(jax.jit(with_gradients(f))(*inputs(time)) for f in (ours, naive)))


@pytest.mark.parametrize(
    ("time", "model"),
    [(7, 1), (128, 2), *(pytest.param(time, model, marks=pytest.mark.slow) for time, model in ((7, 2), (128, 1)))],
)
@pytest.mark.parametrize(
    "of",
    [
        AttentionSpec(HEADS, HEADS, causal=False),
        AttentionSpec(HEADS, 2),
        AttentionSpec(HEADS, 4, causal=False, rotary=Rotary(100.0)),
        AttentionSpec(HEADS, 2, span=3),
        AttentionSpec(HEADS, HEADS, causal=False, span=50),
        AttentionSpec(HEADS, 4, span=40, scale=0.7, softcap=1.5),
    ],
    ids=["both ways", "grouped", "grouped and turned", "grouped, in a window", "both ways, in a window", "capped"],
)
def test_heads_see_and_share_and_turn_as_they_are_told(of, model, time, x64):
    q, k, v, g = inputs(time)
    k, v = (x[..., : of.kv_heads * WIDTH // HEADS] for x in (k, v))
    segments, positions = documents(time), np.random.default_rng(2).integers(0, 300, (2, time), dtype=np.int32)
    rotary = (lambda x: reference.rotate(x, positions, of.rotary.theta)) if of.rotary else lambda x: x

    def ours(q, k, v):
        return attention(q, k, v, of, positions=positions, segment_ids=segments)

    def naive(q, k, v):
        how = {"causal": of.causal, "rotary": rotary, "span": of.span, "scale": of.scale, "cap": of.softcap}
        return reference.attention(q, k, v, HEADS, segments, **how)

    split = (None, None, "heads")
    got = over_model(with_gradients(ours), model, (split,) * 4, (split,) * 4)(q, k, v, g)
    for a, b in zip(got, jax.jit(with_gradients(naive))(q, k, v, g), strict=True):
        assert relative(a, b) < 1e-13


@pytest.mark.parametrize(
    ("time", "model"),
    [
        (16, 1),
        (16, 2),
        (128, 8),
        *(pytest.param(*both, marks=pytest.mark.slow) for both in ((128, 1), (128, 2), (16, 8))),
    ],
)
def test_dropout_is_keyed_by_head_and_position_however_heads_are_split(time, model, x64):
    samples, segments = np.array([3, 9]), documents(time)
    key = DropoutKey(jnp.uint32(5), jnp.int32(7), jnp.asarray(samples, jnp.int32), 2)

    def ours(q, k, v):
        return attention(q, k, v, dataclasses.replace(ALL, dropout=0.25, span=12), key=key, segment_ids=segments)

    def drop(p):
        return reference.Dropout((5, 7), samples).probabilities(p, 0.25, 2)

    def naive(q, k, v):
        return reference.attention(q, k, v, HEADS, segments, drop, span=12)

    split = (None, None, "heads")
    check(
        over_model(with_gradients(ours), model, (split,) * 4, (split,) * 4)(*inputs(time)),
        jax.jit(with_gradients(naive))(*inputs(time)),
    )


def test_no_draw_is_no_dropout(x64):
    q, k, v, _ = inputs(8)
    with_rate, without = (attention(q, k, v, dataclasses.replace(ALL, dropout=rate)) for rate in (0.5, 0.0))
    np.testing.assert_array_equal(with_rate, without)


def test_softmax_of_bfloat16_is_float32():
    q, k, v, _ = (x.astype(jnp.bfloat16) for x in inputs(64))
    got = attention(q, k, v, ALL)
    wide = reference.attention(*(x.astype(np.float32) for x in (q, k, v)), HEADS)
    assert got.dtype == jnp.bfloat16
    assert relative(got.astype(np.float32), wide) < 2**-7
    jaxpr = str(jax.make_jaxpr(lambda q, k, v: attention(q, k, v, ALL))(q, k, v))
    assert " exp " in jaxpr and "bf16[2,8,64,64] = exp" not in jaxpr


@pytest.mark.parametrize("model", [1, 4])
def test_a_cache_filled_token_by_token_gives_full_attention(model, x64):
    """Rows are read at different positions: the second runs two tokens behind, and only rewrites them at the end."""
    time, room = 6, 9
    q, k, v, _ = inputs(time)
    q, k, v = (x[:1].repeat(2, axis=0) for x in (q, k, v))
    want = np.asarray(reference.attention(q, k, v, HEADS))
    split = (None, None, "heads")
    step = over_model(
        lambda q, k, v, cache, positions: attention_with_cache(q, k, v, ALL, cache, positions=positions),
        model,
        (split, split, split, (split, split), ()),
        (split, (split, split)),
    )
    cache = (
        np.full((2, room, HEADS, WIDTH // HEADS), 1e3),
    ) * 2  # what lies beyond a row's position is never looked at
    for i in range(time + 2):
        at = np.array([min(i, time - 1), max(i - 2, 0)], np.int32)
        rows = np.arange(2)
        out, cache = step(*(x[rows, at][:, None] for x in (q, k, v)), cache, at[:, None])
        np.testing.assert_allclose(out[:, 0], want[rows, at], rtol=0, atol=1e-13)
    for kept, new in zip(cache, (k, v), strict=True):
        np.testing.assert_array_equal(kept[:, :time], new.reshape(2, time, HEADS, -1))
        assert (np.asarray(kept)[:, time:] == 1e3).all()


def test_a_cache_takes_several_tokens_at_once(x64):
    q, k, v, _ = inputs(6)
    cache, at = (jnp.zeros((2, 9, HEADS, WIDTH // HEADS)),) * 2, np.broadcast_to(np.arange(6, dtype=np.int32), (2, 6))
    out, _ = attention_with_cache(q, k, v, ALL, cache, positions=at)
    assert relative(out, reference.attention(q, k, v, HEADS)) < 1e-13


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("span", [None, 3, 40, 100, 200])
def test_shares_of_scores_are_those_of_masks_and_of_blocks(causal, span):
    """Blocks leave out nothing that a mask shows, and compute no more for a window than without one."""
    time = 128
    row, column = np.arange(time)[:, None], np.arange(time)
    mask = (column <= row if causal else True) & (abs(row - column) < (span or time))
    cover = np.zeros((time, time), bool)
    for queries, keys in query_blocks(time, causal, span):
        cover[queries, keys] = True
    assert (mask <= cover).all()
    if span:
        assert unmasked_scores(time, causal, span) == pytest.approx(np.broadcast_to(mask, cover.shape).mean())
