import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_lm.ops import chunked_attention
from spmd_lm.ops.attention import attention
from spmd_lm.ops.attention_spec import AttentionSpec, Pairs, Tokens
from spmd_lm.ops.chunked_attention import block_size, visible_blocks
from spmd_lm.ops.dropout import DropoutKey
from tests.helpers import relative
from tests.ops.test_attention import documents, with_gradients

HEADS, WIDTH = 4, 32
KEY = DropoutKey(jnp.uint32(5), jnp.int32(7), jnp.array([3, 9], jnp.int32), 2)
OF_MANY_KINDS = {
    "causal": AttentionSpec(HEADS, HEADS),
    "bidirectional, dropped": AttentionSpec(HEADS, 1, causal=False, dropout=0.25),
    "capped, in a window, dropped": AttentionSpec(HEADS, 2, span=20, softcap=1.5, scale=0.7, dropout=0.1),
    "in a window both ways": AttentionSpec(HEADS, HEADS, causal=False, span=9),
}


def arrays(time: int, spec: AttentionSpec, rows: int = 2) -> list[np.ndarray]:
    """q, k, v and the gradient of the result."""
    generator = np.random.default_rng(0)
    widths = WIDTH, *[WIDTH // HEADS * spec.kv_heads] * 2, WIDTH
    return [generator.normal(size=(rows, time, width)) for width in widths]


def run(spec: AttentionSpec, kernel: str, segments, *args):
    spec = dataclasses.replace(spec, kernel=kernel)
    return jax.jit(with_gradients(lambda q, k, v: attention(q, k, v, spec, segment_ids=segments, key=KEY)))(*args)


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("time", [61, *(pytest.param(time, marks=pytest.mark.slow) for time in (7, 64))])
@pytest.mark.parametrize("spec", OF_MANY_KINDS.values(), ids=OF_MANY_KINDS)
def test_results_and_gradients_are_the_dense_kernels(spec, time, packed, x64):
    """With the same bits of dropout; also where blocks do not divide the row."""
    spec, segments = dataclasses.replace(spec, block=16), documents(time) if packed else None
    inputs = arrays(time, spec)
    for got, want in zip(*(run(spec, kernel, segments, *inputs) for kernel in ("chunked", "xla")), strict=True):
        assert relative(got, want) < 1e-12


def test_bfloat16_is_as_exact_as_the_dense_kernels():
    spec = OF_MANY_KINDS["causal"]
    inputs = [x.astype(jnp.bfloat16) for x in arrays(300, spec)]
    exact = run(spec, "xla", None, *(x.astype(np.float32) for x in inputs))
    for got, dense, want in zip(
        *(run(spec, kernel, None, *inputs) for kernel in ("chunked", "xla")), exact, strict=True
    ):
        assert got.dtype == jnp.bfloat16
        assert relative(got.astype(np.float32), want) < max(2**-7, 1.5 * relative(dense.astype(np.float32), want))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("span", [None, 1, 3, 16, 17, 40, 200])
def test_blocks_are_those_with_visible_pairs(causal, span):
    time, size = 128, 16
    row, column = np.arange(time)[:, None], np.arange(time)
    mask = (column <= row if causal else True) & (abs(row - column) < (span or time))
    visible = np.broadcast_to(mask, (time, time)).reshape(8, 16, 8, 16).any((1, 3))
    np.testing.assert_array_equal(visible_blocks(time, size, causal, span), np.argwhere(visible))


@pytest.mark.parametrize("time", [1, 127, 128, 129, 1000, 1021, 4096])
def test_blocks_are_even(time):
    size = block_size(time, 128)
    blocks = -(-time // size)
    assert size <= 128 and blocks == -(-time // 128) and blocks * size - time < 8 * blocks


def temporaries(time: int) -> int:
    """Bytes, forward and backward, of one row in blocks of 128."""
    spec = AttentionSpec(2, 2, dropout=0.1, kernel="chunked", block=128)
    q = jax.ShapeDtypeStruct((1, time, 64), jnp.float32)
    key = DropoutKey(jnp.uint32(5), jnp.int32(7), jnp.zeros(1, jnp.int32))
    step = jax.jit(with_gradients(lambda q, k, v: attention(q, k, v, spec, key=key)))
    return step.lower(q, q, q, q).compile().memory_analysis().temp_size_in_bytes


def test_memory_grows_with_the_row_not_its_square():
    short, long = temporaries(4096), temporaries(32768)
    assert long <= 8.8 * short and long < 32768**2


def test_queries_without_a_visible_key_have_no_gradient(x64):
    """Around a ring a query's document may have no token on a device: its sum is empty, its gradients are zero."""
    spec = AttentionSpec(HEADS, HEADS, causal=False)
    q, k, v, g = (x.reshape(2, 32, HEADS, -1) for x in arrays(32, spec))
    queries, keys = np.zeros((2, 32), np.int32), np.ones((2, 32), np.int32)
    keys[:, :5] = 0
    queries[:, 7:] = 2
    positions = jnp.arange(32)
    pairs = Pairs(Tokens(positions, queries), Tokens(positions, keys))
    out, logsumexp = chunked_attention.forward(q, k, v, pairs, spec)
    assert (out[:, 7:] == 0).all() and np.isneginf(logsumexp[..., 7:]).all() and np.isfinite(logsumexp[..., :7]).all()
    d_q, d_k, d_v = chunked_attention.backward(q, k, v, pairs, spec, out, logsumexp, g)
    assert (d_q[:, 7:] == 0).all() and (d_k[:, 5:] == 0).all() and (d_v[:, 5:] == 0).all() and (d_v[:, :5] != 0).any()
