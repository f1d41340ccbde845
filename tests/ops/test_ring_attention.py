"""Attention of rows that devices share, around a ring or by heads, is the dense kernel's of one device, gradients
included."""

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from spmd_lm.active_rules import AxisRules, use_axis_rules
from spmd_lm.analysis.compiled_flops import compiled_flops
from spmd_lm.analysis.hlo import HloModule
from spmd_lm.axes import CONTEXT, TIME
from spmd_lm.ops import attention as attention_module
from spmd_lm.ops import ring_attention
from spmd_lm.ops.attention import KERNELS, attention
from spmd_lm.ops.attention_spec import AttentionSpec
from spmd_lm.ops.rotary import Rotary
from spmd_lm.ops.shared_rows import gather_rows, own_tokens
from spmd_lm.parallel.mesh import Layout, make_mesh
from tests.helpers import relative
from tests.ops.test_attention import documents, with_gradients
from tests.ops.test_chunked_attention import HEADS, KEY, WIDTH, arrays
from tests.ops.test_fused_attention import INTERPRETED

TIME_OF_ROW = 32
SPECS = {
    "causal": AttentionSpec(HEADS, HEADS),
    "causal, grouped, turned, dropped": AttentionSpec(HEADS, 2, rotary=Rotary(100.0), dropout=0.25),
    "bidirectional": AttentionSpec(HEADS, HEADS, causal=False),
    "bidirectional, grouped, dropped, capped": AttentionSpec(
        HEADS, 1, causal=False, dropout=0.25, scale=0.7, softcap=1.5
    ),
}


def on_ring(devices: int, spec: AttentionSpec, segments, *args, **options):
    """Attention of whole rows, and gradients, around a ring; arguments and results are whole rows."""
    return ring(devices, spec, segments, **options)(*args)


def ring(
    devices: int,
    spec: AttentionSpec,
    segments,
    *,
    by_heads: bool = False,
    under_rules: bool = True,
    zigzag: bool | None = None,
):
    """The jitted function of q, k, v and the gradient of the result.
    by_heads: whether devices exchange heads for tokens in place of a ring.
    under_rules: whether it is differentiated under the rules that it is traced under.
    zigzag: whether a device has two chunks of a row; default as it must be."""
    layout = Layout(context=devices)
    rules = AxisRules(
        {TIME: (CONTEXT,), "heads": ()},
        layout.sizes,
        ring=not by_heads,
        zigzag=(spec.causal and not by_heads) if zigzag is None else zigzag,
    )

    def run(q, k, v, g):
        with use_axis_rules(rules):
            positions = own_tokens(jnp.broadcast_to(jnp.arange(q.shape[1], dtype=jnp.int32), q.shape[:2]), 1)
            f = functools.partial(attention, spec=spec, positions=positions, segment_ids=segments, key=KEY)
            q, k, v, g = (own_tokens(x, 1) for x in (q, k, v, g))
            out, back = jax.vjp(f, q, k, v)
        with use_axis_rules(rules if under_rules else None):
            gradients = back(g)
        with use_axis_rules(rules):
            return tuple(map(gather_rows, (out, *gradients)))

    mesh = make_mesh(layout, jax.devices()[:devices])
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))


@functools.partial(jax.jit, static_argnums=0)
def dense(spec: AttentionSpec, segments, *args):
    positions = jnp.broadcast_to(jnp.arange(args[0].shape[1], dtype=jnp.int32), args[0].shape[:2])
    f = functools.partial(attention, spec=spec, positions=positions, segment_ids=segments, key=KEY)
    return with_gradients(f)(*args)


def assert_is_dense(
    devices: int, spec: AttentionSpec, packed: bool, tolerance: float = 1e-12, *, by_heads: bool = False
) -> None:
    segments, args = documents(TIME_OF_ROW) if packed else None, arrays(TIME_OF_ROW, spec)
    want = dense(spec, segments, *args)
    got = on_ring(devices, chunked(spec), segments, *args, by_heads=by_heads)
    for a, b in zip(got, want, strict=True):
        assert relative(a, b) < tolerance


def chunked(spec: AttentionSpec) -> AttentionSpec:
    return dataclasses.replace(spec, kernel="chunked")


QUICK = (2, "bidirectional, grouped, dropped, capped", True)
assert QUICK[1] in SPECS


@pytest.mark.parametrize(
    ("devices", "name", "packed"),
    [
        pytest.param(*each, marks=[] if each == QUICK else pytest.mark.slow)
        for each in ((n, name, packed) for n in (2, 4, 8) for name in SPECS for packed in (True, False))
    ],
)
def test_a_ring_is_the_dense_kernel(devices, name, packed, x64):
    assert_is_dense(devices, SPECS[name], packed)


def test_heads_for_tokens_are_the_dense_kernel(x64):
    """Of two key/value heads each of four devices has half: they are repeated."""
    assert_is_dense(4, SPECS["causal, grouped, turned, dropped"], packed=True, by_heads=True)


@pytest.mark.parametrize(
    "devices", [2, pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)]
)
def test_a_causal_ring_computes_no_hidden_chunk(devices):
    """(2n + 1)(t/2)^2 of each head, in two products, in the program that the compiler makes of forward."""
    chunk = 16
    spec, tokens = dataclasses.replace(chunked(SPECS["causal"]), block=chunk), 2 * chunk * devices
    args = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in arrays(tokens, spec, rows=1)]
    forward = jax.jit(lambda *args: ring(devices, spec, None)(*args)[0])
    a_product = 2 * (2 * devices + 1) * chunk**2 * WIDTH
    found = compiled_flops(HloModule(forward.lower(*args).compile().as_text()))
    assert found == pytest.approx(2 * a_product, rel=0.02)


LENGTHS = np.array([[13, 13, 6], [6, 13, 13]])  # of documents, by row


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "causal"),
    [(2, True), (4, True), (8, True), (4, False)],
)
def test_a_packed_document_is_what_it_is_alone(devices, causal, x64):
    """Each is cut out of its row, and attends alone: its losses, results times g, and gradients."""
    spec = AttentionSpec(HEADS, 2, causal)
    args, segments = arrays(TIME_OF_ROW, spec), np.array([np.repeat(np.arange(3), of_row) for of_row in LENGTHS])
    in_rows = [np.asarray(x) for x in on_ring(devices, chunked(spec), segments, *args)]
    for row, document in np.ndindex(LENGTHS.shape):
        cut = np.flatnonzero(segments[row] == document)
        own = [x[row : row + 1, cut] for x in args]
        alone = [np.asarray(x[0]) for x in dense(spec, None, *own)]
        losses = [(out * own[3][0]).sum(1) for out in (in_rows[0][row, cut], alone[0])]
        assert losses[0] == pytest.approx(losses[1], rel=1e-12, abs=1e-13)
        for a, b in zip(in_rows, alone, strict=True):
            assert relative(a[row, cut], b) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_splash_goes_around_a_ring(causal, packed, monkeypatch):
    """The kernel that TPUs run, here by an interpreter, in float32, in chunks of 128."""
    monkeypatch.setitem(KERNELS, "splash", INTERPRETED)
    time, width = 512 if causal else 256, 64
    spec = AttentionSpec(2, 1, causal)
    q, k, v, g = np.random.default_rng(0).normal(size=(4, 1, time, 2 * width)).astype(np.float32)
    args, segments = (q, k[..., :width], v[..., :width], g), documents(time, 1) if packed else None
    want = dense(spec, segments, *args)
    for a, b in zip(on_ring(2, dataclasses.replace(spec, kernel="splash"), segments, *args), want, strict=True):
        assert relative(a, b) < 1e-5


def test_backward_without_rules_is_an_error():
    """It would see no ring, and attend to a device's own tokens alone."""
    spec = AttentionSpec(HEADS, HEADS, kernel="chunked")
    with pytest.raises(AssertionError, match="other rules"):
        on_ring(2, spec, None, *arrays(8, spec), under_rules=False)


IN_ORDER = "device * self.chunks * self.size + jnp.arange(self.chunks * self.size, dtype=jnp.int32)"
FAULTS = {
    "hops are one short": ("arange(1, self.devices - 1", "arange(1, self.devices - 2"),
    "gradients travel one hop too few": ("ring.send([ring.join(x, 1)", "([ring.join(x, 1)"),
    "gradients stay": ("d_kv = ring.send(d_kv)", "d_kv = d_kv"),
    "keys travel the other way": ("(i, (i + 1) % self.devices)", "((i + 1) % self.devices, i)"),
    "documents are the wrong device's": ("self._tokens(j, source)", "self._tokens(j, self.device)"),
    "chunks lie in order": ("_part(time_positions(self.chunks * self.size, device)", f"_part(({IN_ORDER})"),
    "the other chunk is before this one": ("(source > self.device)", "(source < self.device)"),
    "parts have equal shares": ("jnp.exp(logsumexp - shift)", "0.5 * jnp.ones_like(logsumexp)"),
}


def replaced(old: str, new: str) -> Callable:
    """`ring_attention` of the module with one expression replaced."""
    source = inspect.getsource(ring_attention)
    assert source.count(old) == 1, old
    module = types.ModuleType(ring_attention.__name__)
    exec(source.replace(old, new), vars(module))
    return module.ring_attention


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_told(fault, monkeypatch, x64):
    monkeypatch.setattr(attention_module, "ring_attention", replaced(*FAULTS[fault]))
    with pytest.raises(AssertionError, match="relative"):
        assert_is_dense(4, SPECS["causal"], packed=True)


def test_contiguous_tokens_in_a_causal_ring_are_an_error():
    spec = AttentionSpec(HEADS, HEADS, kernel="chunked")
    with pytest.raises(AssertionError, match="zig-zag"):
        on_ring(2, spec, None, *arrays(8, spec), zigzag=False)
