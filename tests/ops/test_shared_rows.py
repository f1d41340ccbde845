"""Which tokens of a row a device has, and how it gets those of the others."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from spmd_lm.active_rules import AxisRules, use_axis_rules
from spmd_lm.axes import CONTEXT, SEQUENCE, TIME
from spmd_lm.ops.collectives import row_positions
from spmd_lm.ops.shared_rows import (
    from_first,
    gather_rows,
    heads_to_time,
    on_first,
    own_tokens,
    repeat_heads,
    time_to_heads,
)
from spmd_lm.parallel.mesh import Layout, make_mesh

LAYOUT, EVERYWHERE = Layout(context=4, model=2), P()
ZIGZAG = pytest.mark.parametrize("zigzag", [False, True])


def on_devices(f, *args, zigzag: bool = False, sequence: tuple[str, ...] = (), out: P = EVERYWHERE):
    """f(*args) on the devices of LAYOUT; every device has all of the arguments."""

    def run(*args):
        with use_axis_rules(AxisRules({TIME: (CONTEXT,), SEQUENCE: sequence}, LAYOUT.sizes, zigzag=zigzag)):
            return f(*args)

    mesh = make_mesh(LAYOUT, jax.devices()[: LAYOUT.devices])
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=out, check_vma=False))(*args)


def test_tokens_lie_in_order_or_from_both_ends():
    of_stream = P((CONTEXT, "model"))
    plain = on_devices(functools.partial(row_positions, 4), out=P(CONTEXT))
    assert plain.tolist() == [*range(16)]
    both_ends = on_devices(functools.partial(row_positions, 4), zigzag=True, out=P(CONTEXT))
    assert both_ends.tolist() == [0, 1, 14, 15, 2, 3, 12, 13, 4, 5, 10, 11, 6, 7, 8, 9]
    sequence = functools.partial(row_positions, 2, SEQUENCE)
    assert on_devices(sequence, zigzag=True, sequence=("model",), out=of_stream).tolist() == both_ends.tolist()


def test_devices_have_equal_numbers_of_causal_pairs():
    positions = on_devices(functools.partial(row_positions, 16), zigzag=True, out=P(CONTEXT)).reshape(4, 16)
    assert len({int((each + 1).sum()) for each in positions}) == 1


@ZIGZAG
def test_rows_are_gathered_in_order_and_gradients_summed(zigzag):
    rows = jnp.arange(2 * 16 * 3.0).reshape(2, 16, 3)

    def gathered(rows):
        whole, vjp = jax.vjp(gather_rows, own_tokens(rows, 1))
        (gradient,) = vjp(rows * jax.lax.axis_index(CONTEXT))
        return whole, gather_rows(gradient)

    whole, gradient = on_devices(gathered, rows, zigzag=zigzag)
    np.testing.assert_array_equal(whole, rows)
    np.testing.assert_array_equal(gradient, rows * (0 + 1 + 2 + 3))


def test_heads_are_exchanged_for_tokens_and_back():
    x = jnp.arange(2 * 16 * 8 * 3.0).reshape(2, 16, 8, 3)

    def exchanged(x):
        heads = time_to_heads(own_tokens(x, 1), TIME)
        _, vjp = jax.vjp(lambda own: time_to_heads(own, TIME), own_tokens(x, 1))
        return heads, heads_to_time(heads, TIME), *vjp(heads)

    heads, back, gradient = on_devices(exchanged, x, out=(P(None, None, CONTEXT), P(None, CONTEXT), P(None, CONTEXT)))
    for each in (heads, back, gradient):
        np.testing.assert_array_equal(each, x)


@pytest.mark.parametrize(("kv_heads", "sent"), [(1, 4), (2, 4), (3, 12), (4, 4), (6, 12), (8, 8)])
def test_heads_are_repeated_as_little_as_it_takes(kv_heads, sent):
    """Each of 24 query heads meets the key head that it meets on one device."""
    x = jnp.arange(kv_heads * 1.0).reshape(1, 1, kv_heads, 1)
    repeated = on_devices(repeat_heads, x)[0, 0, :, 0]
    assert len(repeated) == sent
    np.testing.assert_array_equal(repeated.repeat(24 // sent), x.ravel().repeat(24 // kv_heads))


def test_what_is_of_a_row_counts_once():
    def counted(x):
        of_device = x + jax.lax.axis_index(CONTEXT)
        return jax.lax.psum(on_first(of_device), CONTEXT), from_first(of_device)

    assert [float(each) for each in on_devices(counted, jnp.float32(7))] == [7, 7]


def test_without_the_axis_nothing_is_done():
    x = jnp.arange(24.0).reshape(1, 4, 6)
    for f in (gather_rows, on_first, from_first, functools.partial(own_tokens, dim=1)):
        assert f(x) is x
