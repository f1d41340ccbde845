import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from spmd_lm.active_rules import AxisRules, num_shards, use_axis_rules
from spmd_lm.axes import is_dim_names
from spmd_lm.errors import LayoutError
from spmd_lm.ops.collectives import (
    all_gather,
    copy_to_region,
    gather_sequence,
    global_indices,
    local_slice,
    pmax,
    psum,
    reduce_from_region,
    reduce_scatter,
    reduce_scatter_or_psum,
    shard_index,
)
from spmd_lm.ops.compiler_workarounds import padded_columns
from spmd_lm.parallel.mesh import Layout, make_mesh

RULES = {"batch": (), "heads": ("model",), "both": ("data", "model"), "alone": ("pipe",), "sequence": ()}
LAYOUT = Layout(data=2, model=4)
EVERYWHERE = P()
X = np.random.default_rng(0).normal(size=(2, 8, 4))


def run(f, *args, ins=EVERYWHERE, outs=EVERYWHERE, **rules):
    """f on every device of LAYOUT, under RULES."""

    def local(*args):
        with use_axis_rules(AxisRules(RULES | rules, LAYOUT.sizes)):
            return f(*args)

    mesh = make_mesh(LAYOUT, jax.devices())
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False))(*args)


def test_a_name_that_no_rule_knows_is_refused():
    with pytest.raises(LayoutError, match="no rule places the dimension 'haeds'"):
        run(lambda: jnp.int32(num_shards("haeds")))


def test_each_device_sees_its_own_part_and_what_the_others_make_of_theirs():
    def local(x):
        assert x.shape == (1,)
        places = [shard_index(name) for name in ("both", "heads", "alone")]
        sums = [psum(x[0], name) for name in ("both", "heads", "alone")]
        return jnp.stack([*places, *sums, pmax(x[0], "heads"), global_indices("both", 3)[1]])[None]

    got = run(local, jnp.arange(8, dtype=jnp.int32) ** 2, ins=P(("data", "model")), outs=P(("data", "model")))
    squares = np.arange(8) ** 2
    halves = squares.reshape(2, 4).repeat(4, axis=0)
    want = [range(8), [0, 1, 2, 3] * 2, [0] * 8, [squares.sum()] * 8, halves.sum(1), squares, halves.max(1)]
    np.testing.assert_array_equal(got, np.transpose([*map(list, want), list(range(1, 24, 3))]))


def test_parts_are_counted_where_there_are_devices():
    assert run(lambda: [jnp.int32(num_shards(name)) for name in RULES]) == [1, 4, 8, 1, 1]


def test_a_part_of_what_is_whole_and_the_whole_of_parts(x64):
    own = run(lambda x: local_slice(x, "heads", 1), X, outs=P(None, "model"))
    np.testing.assert_array_equal(own, X)
    np.testing.assert_array_equal(run(lambda x: all_gather(x, "heads", 1), X, ins=P(None, "model")), X)


@pytest.mark.parametrize("shard", [1, 2, 3, 4])
@pytest.mark.parametrize(("dim", "row_major"), [(0, True), (0, False), (1, False)])
def test_shards_of_every_size_are_sums(shard, dim, row_major, x64):
    """Scattering over two axes, one after the other, gives the shards of both at once."""
    both = ("data", "model")
    for on, outs in {("model",): P("data", "model") if dim else P(both), both: P(*[None] * dim, both)}.items():
        size = shard * (4 if on == ("model",) else 8)
        addends = np.random.default_rng(shard).normal(size=(8, *((size, 3) if dim == 0 else (1, size))))
        got = run(lambda x, on=on: reduce_scatter(x[0], on, dim, row_major=row_major), addends, ins=P(both), outs=outs)
        of_groups = addends.reshape(2, 4, *addends.shape[1:]).sum(1)  # of one `data` each
        want = np.concatenate(of_groups) if on == ("model",) else of_groups.sum(0)
        np.testing.assert_allclose(got, want, rtol=1e-12)


@pytest.mark.parametrize(
    ("shape", "axis_sizes", "columns"),
    [
        ((5120, 8064), [2], 8192),  # 63 tiles of columns, 320 of rows: windows of 315, and at most 304 fit
        ((5120, 8000), [2], 8192),
        ((5120, 6784), [2], 6784),  # 53: windows of 265
        ((5120, 6700), [2], 6700),  # what the last tile lacks is padded in memory anyway
        ((5120, 6784), [4], 6912),  # windows of 265, and at most 228: 54 tiles, of 135
        ((5120, 6784), [2, 4], 6912),
        ((5120, 6784), [4, 2], 6912),
        ((25600, 12800), [2], 12800),  # windows of 625; the next that would fit are 12% larger
        ((5120, 8064), [], 8064),
        ((64, 128), [32], 128),  # two rows for each device, less than a tile
        ((32, 6784), [4, 8], 6784),
    ],
)
def test_columns_are_padded_until_tiles_halve_into_windows(shape, axis_sizes, columns):
    assert padded_columns(shape, axis_sizes) == columns


@pytest.mark.parametrize("sequence", [(), ("model",)], ids=["whole", "split"])
def test_a_stretch_of_split_matrices_computes_their_product(sequence, x64):
    """x A B, with A column-parallel and B row-parallel, and its gradients: f and g, and their sequence-parallel kin."""
    r = np.random.default_rng(1)
    a, b, g = r.normal(size=(4, 12)), r.normal(size=(12, 4)), r.normal(size=X.shape)

    def f(
        x,
        a,
        b,
        f_op=lambda x: copy_to_region(x, "heads"),
        g_op=lambda y: reduce_from_region(y, "heads"),
    ):
        return g_op(jnp.tanh(f_op(x) @ a) @ b)

    def both(x, a, b, g, **ends):
        out, back = jax.vjp(lambda *args: f(*args, **ends), x, a, b)
        return out, *back(g)

    stream, columns, rows = P(None, sequence or None), P(None, "model"), P("model")
    specs = {"ins": (stream, columns, rows, stream), "outs": (stream, stream, columns, rows)}
    got = run(both, X, a, b, g, **specs, sequence=sequence)

    def same(x):
        return x

    for ours, plain in zip(got, both(X, a, b, g, f_op=same, g_op=same), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=0, atol=1e-13)


def test_with_no_placement_every_array_is_whole():
    x = jnp.ones((1, 3, 2))
    assert num_shards("heads") == 1 and int(shard_index("heads")) == 0
    for f in (
        psum,
        pmax,
        reduce_scatter_or_psum,
        copy_to_region,
        reduce_from_region,
    ):
        assert f(x, "heads") is x, f
    assert gather_sequence(x) is x and all_gather(x, "heads", 1) is x and local_slice(x, "heads", 1) is x


def test_names_are_told_from_containers():
    assert is_dim_names(("heads", None)) and is_dim_names(())
    assert not is_dim_names((("heads",), None)) and not is_dim_names(["heads"])
