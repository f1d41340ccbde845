"""Kernels of libraries as forward and backward, and the private names of jax that this takes."""

import dataclasses
import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_lm.ops import fused_attention, jax_internals
from spmd_lm.ops.attention import KERNELS, attention, run_kernel
from spmd_lm.ops.attention_spec import AttentionSpec, Kernel, Pairs, Tokens
from tests.helpers import relative
from tests.ops.test_attention import check, documents, with_gradients

INTERPRETED = Kernel(
    functools.partial(fused_attention.splash_forward, interpret=True),
    functools.partial(fused_attention.splash_backward, interpret=True),
)


@pytest.mark.parametrize(
    ("width", "packed", "causal", "shared", "own"),
    [
        pytest.param(64, False, True, 1, {}, marks=pytest.mark.slow),
        pytest.param(128, True, True, 1, {"span": 40, "softcap": 1.5, "scale": 0.3}, marks=pytest.mark.slow),
        pytest.param(64, True, False, 1, {}, marks=pytest.mark.slow),
        pytest.param(64, True, True, 2, {}, marks=pytest.mark.slow),
        (64, False, False, 4, {}),
        pytest.param(64, False, False, 4, {"span": 17}, marks=pytest.mark.slow),
    ],
)
def test_splash_is_the_dense_attention(width, packed, causal, shared, own):
    """The kernel that TPUs run, here by an interpreter, in float32.  shared: queries for each head of keys."""
    q, k, v, g = np.random.default_rng(0).normal(size=(4, 1, 128, 4 * width)).astype(np.float32)
    k, v = (x[..., : 4 * width // shared] for x in (k, v))
    segments = documents(128, 1) if packed else None
    spec = AttentionSpec(4, 4 // shared, causal, **own)
    tokens = Tokens(jnp.arange(128), segments)

    def splash(q, k, v):
        heads = spec.split_heads(q, k, v, None)
        return run_kernel(*heads, Pairs(tokens, tokens), spec, INTERPRETED).reshape(q.shape)

    def dense(q, k, v):
        return attention(q, k, v, spec, segment_ids=segments)

    for a, b in zip(*(with_gradients(f)(q, k, v, g) for f in (splash, dense)), strict=True):
        assert relative(a, b) < 4e-6


@pytest.mark.slow
@pytest.mark.parametrize("packed", [True, False])
def test_splash_takes_the_sum_of_more_keys_than_it_is_given(packed):
    """Two calls, each with half of the keys, merged by their sums, and backward from the merged sum."""
    q, k, v, g = np.random.default_rng(0).normal(size=(4, 1, 256, 2, 64)).astype(np.float32)
    k, v = k[:, :, :1], v[:, :, :1]
    segments = documents(256, 1) if packed else None
    spec, positions = AttentionSpec(2, 1, causal=False), jnp.arange(128)
    chunked, half = KERNELS["chunked"], [slice(0, 128), slice(128, 256)]

    def pairs(i, j):
        return Pairs(*(Tokens(positions, None if segments is None else segments[:, half[n]]) for n in (i, j)))

    whole = Tokens(jnp.arange(256), segments)
    out, logsumexp = chunked.forward(q, k, v, Pairs(whole, whole), spec)
    want = chunked.backward(q, k, v, Pairs(whole, whole), spec, out, logsumexp, g)
    d_k = d_v = 0
    for i in (0, 1):
        parts, results = (q[:, half[i]], k, v), (out[:, half[i]], logsumexp[..., half[i]], g[:, half[i]])
        found = [
            INTERPRETED.backward(parts[0], k[:, half[j]], v[:, half[j]], pairs(i, j), spec, *results) for j in (0, 1)
        ]
        assert relative(found[0][0] + found[1][0], want[0][:, half[i]]) < 1e-5
        d_k, d_v = (total + np.concatenate([each[n] for each in found], 1) for n, total in ((1, d_k), (2, d_v)))
    assert relative(d_k, want[1]) < 1e-5 and relative(d_v, want[2]) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize(("width", "span"), [(64, None), (128, None), (64, 40)])
def test_cudnn_is_the_dense_attention(width, span):
    q, k, v, g = np.random.default_rng(0).normal(size=(4, 2, 256, 4 * width)).astype(jnp.bfloat16)

    def run(kernel):
        spec = AttentionSpec(4, 4, span=span, kernel=kernel)
        return with_gradients(lambda q, k, v: attention(q, k, v, spec))(q, k, v, g)

    cudnn, dense = ([x.astype(np.float32) for x in run(kernel)] for kernel in ("cudnn", "xla"))
    check(cudnn, dense, 2**-6)


@pytest.mark.gpu
def test_cudnn_takes_the_sum_of_more_keys_than_it_is_given():
    """The second half of a row attends to the first as a whole, and to itself under a causal mask."""
    q, k, v, g = np.random.default_rng(0).normal(size=(4, 2, 256, 4, 64)).astype(jnp.bfloat16)
    spec, positions = AttentionSpec(4, 4), jnp.arange(128)
    whole, tokens = Tokens(jnp.arange(256)), Tokens(positions)
    chunked, cudnn = KERNELS["chunked"], KERNELS["cudnn"]
    out, logsumexp = chunked.forward(q, k, v, Pairs(whole, whole), spec)
    want = chunked.backward(q, k, v, Pairs(whole, whole), spec, out, logsumexp, g)[0][:, 128:]
    of_second = [x[:, 128:] for x in (q, out, g)]
    d_q = 0.0
    for keys, causal in ((slice(0, 128), False), (slice(128, 256), True)):
        of_keys = dataclasses.replace(spec, causal=causal)
        results = of_second[1], logsumexp[..., 128:], of_second[2]
        found = cudnn.backward(of_second[0], k[:, keys], v[:, keys], Pairs(tokens, tokens), of_keys, *results)
        d_q = d_q + found[0].astype(np.float32)
    assert relative(d_q, want.astype(np.float32)) < 2e-2


@pytest.fixture
def without_cudnn(monkeypatch):
    """Lets jax lower cuDNN's attention where there is none."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91200)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(cudnn, "is_cuda_compute_capability_equal", lambda capability: False)


CALL = re.compile(r'@"?(__cudnn\$\w+)"?.*?backend_config = "(.*?)"[,}]')


def calls(f, *args) -> list[tuple[str, str]]:
    """(target, configuration) of each call of cuDNN in f's program for GPUs."""
    text = jax.jit(with_gradients(f)).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return CALL.findall(text)


@pytest.mark.parametrize(
    ("spec", "padded"),
    [
        (AttentionSpec(4, 2), False),
        (AttentionSpec(4, 4, span=40, scale=0.3), False),
        (AttentionSpec(4, 4, causal=False), True),
    ],
    ids=["grouped", "in a window", "padded"],
)
def test_cudnn_is_called_as_jax_calls_it(spec, padded, without_cudnn):
    """Forward and backward, with masks, windows and lengths."""
    q, kv = (jax.ShapeDtypeStruct((2, 256, n, 64), jnp.bfloat16) for n in (spec.heads, spec.kv_heads))
    segments = np.ones((2, 256), np.int32) if padded else None
    tokens = Tokens(jnp.arange(256), segments)

    def ours(q, k, v):
        return run_kernel(q, k, v, Pairs(tokens, tokens), spec, KERNELS["cudnn"])

    def public(q, k, v):
        n = None if segments is None else jnp.asarray(segments.sum(1), jnp.int32)
        window = (spec.span - 1, 0) if spec.span else None
        options = {"is_causal": spec.causal, "scale": spec.scale, "local_window_size": window}
        options |= {"query_seq_lengths": n, "key_value_seq_lengths": n}
        return jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **options)

    found, asked = (calls(f, q, kv, kv, q) for f in (ours, public))
    assert len(asked) == 2 and found == asked


def test_private_names_take_what_they_are_given():
    """A jax that moves or changes them fails here."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    def arguments(f) -> str:
        return " ".join(inspect.signature(f).parameters)

    assert arguments(splash._splash_attention_bwd) == (
        "save_residuals mask_value is_mqa block_sizes residual_checkpoint_name mask_function attn_logits_soft_cap "
        "interpret res do"
    )
    assert arguments(jax_internals._backward) in (
        "scale seed dropout_rate variadic_args mask_type layout sliding_window_length is_training return_residual "
        "res grad_output",
        "scale seed dropout_rate variadic_args mask_type layout sliding_window_length score_mod cudnn_version "
        "return_residual res grad_output",
    )
