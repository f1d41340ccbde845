import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from spmd_lm.axes import sharded_names
from spmd_lm.parallel.mesh import Layout, abstract_mesh, make_mesh
from spmd_lm.parallel.plan import Plan
from spmd_lm.parallel.zero import ZeroPolicy, with_gathered_weights
from tests.helpers import assert_equal, program, run_of, shard_bytes

NAMES = {"table": ("vocab", "width"), "up": ("layers", "width", "mlp"), "bias": ("layers", "mlp"), "norm": ("width",)}
SHAPES = {"table": (61, 6), "up": (3, 6, 16), "bias": (3, 16), "norm": (6,)}


def plan(layout: Layout, zero: int, devices=None) -> Plan:
    shapes = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
    mesh = abstract_mesh(layout) if devices is None else make_mesh(layout, devices)
    return Plan(layout, mesh, "cpu", NAMES, shapes, ZeroPolicy.of_stage(zero))


def test_matrices_are_cut_along_width_and_vectors_stay_whole():
    assert {name: sharded_names(names) for name, names in NAMES.items()} == {
        "table": ("vocab", "zero_width"),
        "up": ("layers", "zero_width", "mlp"),
        "bias": ("layers", "mlp"),
        "norm": ("width",),
    }


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_what_is_kept_is_cut_over_data_from_stage_1_on(zero):
    specs = plan(Layout(data=2, model=4), zero).param_specs
    data = ("data",) if zero else None
    assert specs["up"] == P(("pipe",), data, ("model",)) and specs["table"] == P(("model",), data)
    assert specs["norm"] == P(None)


def test_shards_that_do_not_divide_are_padded():
    made = plan(Layout(data=4, model=2), 1)
    assert {name: leaf.shape for name, leaf in made.padded_shapes.items()} == {
        "table": (62, 8),
        "up": (3, 8, 16),
        "bias": (3, 16),
        "norm": (6,),
    }
    params = {name: jnp.ones(shape) for name, shape in SHAPES.items()}
    padded = made.from_canonical(params)
    assert float(padded["up"].sum()) == 3 * 6 * 16 and not np.asarray(padded["up"])[:, 6:].any()
    assert_equal(made.canonical(padded), params)


@pytest.mark.parametrize("more_columns", [0, 3])
@pytest.mark.parametrize("layout", [Layout(data=4, model=2), Layout(replica=2, data=2, model=2)], ids=str)
def test_gathering_and_scattering_are_exact(layout, more_columns):
    """A device's gradient is its own number; shards hold the sum over data, and then over replica.
    more_columns: added before the scatter and cropped after it, as in a pipeline on TPUs."""
    made = plan(layout, 3, jax.devices())
    padded_shape = made._scattered_shape

    def with_more_columns(names, shape):
        *outer, columns = padded_shape(names, shape)
        return *outer, columns + more_columns

    vars(made)["_scattered_shape"] = with_more_columns
    r = np.random.default_rng(0)
    whole = {name: jnp.asarray(r.normal(size=shape), jnp.float32) for name, shape in SHAPES.items()}
    padded = made.from_canonical(whole)
    over_data = jax.tree.map(made.param_rules.spec, NAMES, is_leaf=lambda n: isinstance(n, tuple))

    def body(shards):
        full = made.gather(shards, made.sharded_names)
        mine = 1.0 + jax.lax.axis_index("data") + 10 * jax.lax.axis_index("replica")
        shards = made.scatter({name: x * mine for name, x in full.items()}, made.sharded_names, jnp.float32)
        return full, made.psum_gradients(shards, made.sharded_names)

    full, all_reduced = jax.jit(made.shard_map(body, (made.param_specs,), (over_data, made.param_specs)))(padded)
    total = sum(1 + d + 10 * r for d in range(layout.data) for r in range(layout.replica))
    for name in ("table", "up"):
        rows = tuple(slice(n) for n in SHAPES[name])
        np.testing.assert_array_equal(np.asarray(full[name])[rows], whole[name])
        np.testing.assert_allclose(np.asarray(all_reduced[name]), np.asarray(padded[name]) * total, rtol=1e-6)


@pytest.mark.parametrize("held", [True, False])
def test_fetching_scatters_gradients_and_keeps_no_weights(held):
    """`gather` doubles and `scatter` is its transpose, so that both are seen in the result."""
    w, x, extra = jnp.arange(12.0).reshape(3, 4), jnp.arange(1.0, 4), jnp.float32(5)
    gathers = []

    def gather(w):
        gathers.append(w)
        return 2 * w

    run = with_gathered_weights(
        lambda w, x, extra: jnp.tanh(x @ w / 100) * extra, gather, lambda g: 2 * g, prevent_cse=True
    )

    def plain(w, x):
        return (jnp.tanh(x @ (2 * w) / 100) * extra).sum()

    def ours(slots, x):
        return run(slots, w, 2 * w if held else None, x, extra).sum()

    assert_equal(jax.grad(ours, (0, 1))(jnp.zeros_like(w), x), jax.grad(plain, (0, 1))(w, x))
    assert len(gathers) == (0 if held else 2)  # forward and backward
    residuals = jax.tree.leaves(jax.vjp(lambda x: run(jnp.zeros_like(w), w, None, x, extra), x)[1])
    assert sum(leaf.shape == w.shape for leaf in residuals) == 1  # the shards


def test_state_takes_the_bytes_of_its_stage(x64):
    bytes_of = {
        zero: shard_bytes(program(run_of(layout)).init()) for zero, layout in ((0, "data8"), (3, "data8-zero3"))
    }
    whole = program(run_of("data8-zero3")).plan
    vectors = sum(
        leaf.size
        for leaf, names in zip(jax.tree.leaves(whole.shapes), leaves(whole.sharded_names), strict=True)
        if "zero_width" not in names
    )
    scalars = 2 * 4  # the step and Adam's count
    assert bytes_of[3] - scalars == (bytes_of[0] - scalars - 3 * 8 * vectors) / 8 + 3 * 8 * vectors


def leaves(names):
    return jax.tree.leaves(names, is_leaf=lambda n: isinstance(n, tuple))
