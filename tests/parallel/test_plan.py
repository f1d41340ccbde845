import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from spmd_lm.errors import LayoutError
from spmd_lm.parallel.mesh import Layout, abstract_mesh
from spmd_lm.parallel.padding import padded_vocab, padded_width
from spmd_lm.parallel.plan import Plan
from spmd_lm.parallel.zero import ZeroPolicy
from spmd_lm.resolve import abstract_plan
from tests.helpers import assert_equal, make_config

NAMES = {"table": ("vocab", "width"), "blocks": {"up": ("layers", "width", "mlp"), "bias": ("layers", "mlp")}}


def tree(vocab=61, mlp=16):
    shapes = {"table": (vocab, 6), "blocks": {"up": (3, 6, mlp), "bias": (3, mlp)}}

    def is_shape(x):
        return isinstance(x, tuple)

    return jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), shapes, is_leaf=is_shape)


def plan(layout, chunks=1, **sizes) -> Plan:
    return Plan(layout, abstract_mesh(layout), "cpu", NAMES, tree(**sizes), chunks=chunks)


@pytest.mark.parametrize(
    ("vocab", "model", "padded"),
    [
        (61, 1, 61),
        (61, 2, 62),
        (61, 8, 64),
        (64, 8, 64),
        (1023, 1, 1023),  # a full tile would cost an eighth or more
        (1024, 1, 1024),
        (1025, 1, 1152),
        (50257, 1, 50304),
        (50257, 8, 51200),
        (50257, 64, 50304),
    ],
)
def test_a_vocabulary_is_padded_to_full_tiles_where_that_is_cheap(vocab, model, padded):
    assert padded_vocab(vocab, model) == padded


def test_padding_is_an_eighth_at_most_or_less_than_one_row_per_device():
    for vocab in range(1, 5000, 7):
        for model in (1, 2, 3, 4, 8, 16):
            more = padded_vocab(vocab, model) - vocab
            assert padded_vocab(vocab, model) % model == 0
            assert 0 <= more < max(model, vocab / 8 + 1)


@pytest.mark.parametrize(
    ("width", "shards", "padded"),
    [
        (6144, 64, 6144),  # it divides
        (25600, 6, 25632),  # to tiles of 16 rows
        (16384, 15, 16560),
        (20480, 9, 20592),
        (100, 3, 102),  # tiles would cost more than an eighth
        (33, 8, 40),
    ],
)
def test_a_width_is_padded_to_tiles_where_it_must_be_padded(width, shards, padded):
    assert padded_width(width, shards) == padded


def test_a_plan_needs_no_devices():
    made = plan(Layout(data=512, model=8))
    assert made.padded_shapes["table"].shape == (64, 6)
    assert made.param_specs == {
        "table": P(("model",), None),
        "blocks": {"up": P(("pipe",), None, ("model",)), "bias": P(("pipe",), ("model",))},
    }
    assert made.sharding(made.param_specs)["blocks"]["up"].shard_shape((3, 6, 16)) == (3, 6, 2)
    assert made.active_axes("replica", "data", "model") == ("data", "model")


@pytest.mark.parametrize("model", [1, 2, 4, 8])
def test_padding_and_cropping_changes_no_bit(model):
    made, r = plan(Layout(model=model)), np.random.default_rng(0)
    params = jax.tree.map(lambda s: jnp.asarray(r.normal(size=s.shape), s.dtype), tree())
    padded = made.from_canonical(params)
    assert jax.tree.map(jnp.shape, padded) == jax.tree.map(lambda s: s.shape, made.padded_shapes)
    assert_equal(made.canonical(padded), params)
    assert not np.asarray(padded["table"])[61:].any()
    assert_equal(made.from_canonical(made.canonical(padded)), padded)


@pytest.mark.mutants
@pytest.mark.parametrize(("chunks", "divisor"), [(1, "pipe = 2"), (3, "pipe x chunks = 6")])
def test_what_does_not_divide_is_refused_all_at_once(chunks, divisor):
    with pytest.raises(LayoutError) as error:
        plan(Layout(pipe=2, model=8), chunks, mlp=20)
    assert error.value.problems == (
        f"blocks.bias: dimension 'layers' of size 3 is not divisible by {divisor}",
        "blocks.bias: dimension 'mlp' of size 20 is not divisible by model = 8",
        f"blocks.up: dimension 'layers' of size 3 is not divisible by {divisor}",
        "blocks.up: dimension 'mlp' of size 20 is not divisible by model = 8",
    )


def test_canonical_arrays_are_split_where_their_own_size_divides():
    made = plan(Layout(model=8))
    assert made.canonical_specs == made.param_specs | {"table": P(None, None)}
    assert plan(Layout(model=8), vocab=64).canonical_specs == made.param_specs


@pytest.mark.mutants
def test_shared_heads_of_keys_are_divided_where_they_can_be():
    """Undivided ones compute the same, and are held and sent by every device."""
    sections = {"model": {"heads": 4, "kv_heads": 2}}
    one, two = (abstract_plan(make_config(parallel={"model": n}, **sections), n, "cpu", "") for n in (1, 2))
    for key in ("query", "key", "value"):
        path = "blocks", "attention", key
        assert 2 * two.elements_per_device(*path) == one.elements_per_device(*path)


def test_a_model_sees_names_and_the_mesh_axes_that_hold_them():
    axis_rules = plan(Layout(data=4, model=2)).axis_rules
    assert [axis_rules.axes(name) for name in ("batch", "sequence", "heads")] == [
        ("replica", "data"),
        (),
        ("model",),
    ]
    assert axis_rules.sizes == {"pipe": 1, "replica": 1, "data": 4, "model": 2}
    with pytest.raises(LayoutError, match="no rule places the dimension 'haeds'"):
        axis_rules.axes("haeds")


@pytest.mark.parametrize("sequence", [False, True])
def test_what_is_left_to_sum_of_a_gradient(sequence):
    """Matrices are scattered over data; what a split sequence touched in parts is a sum over model too, and what has
    no layers over the stages."""
    layout = Layout(pipe=3, replica=2, data=2, model=2)
    made = Plan(layout, abstract_mesh(layout), "cpu", NAMES, tree(), zero=ZeroPolicy.of_stage(1), sequence=sequence)
    model = ("model",) if sequence else ()
    assert made.grad_reduce_axes(("layers", "zero_width", "mlp")) == ("replica",)
    assert made.grad_reduce_axes(("layers", "mlp")) == ("replica", "data")
    assert made.grad_reduce_axes(("layers", "width")) == ("replica", "data", *model)
    assert made.grad_reduce_axes(("position", "zero_width")) == ("pipe", "replica", *model)


@pytest.mark.parametrize(
    ("platform", "keys", "tiles"),
    [
        ("tpu", {}, 234),
        ("gpu", {}, 233),
        ("tpu", {"run_idle_stages": True}, 233),
        ("tpu", {"zero": 1}, 233),
        ("tpu", {"pipe": 1}, 233),
    ],
)
def test_stages_on_a_tpu_scatter_a_table_of_more_columns(platform, keys, tiles):
    """Branches scatter the table: its 233 tiles, a prime, would not halve."""
    parallel = {"pipe": 4, "data": 4, "zero": 2, "microbatches": 4} | keys
    config = make_config(model={"layers": 4, "width": 256, "vocab": 128 * 233}, parallel=parallel)
    plan = abstract_plan(config, 4 * parallel["pipe"], platform, "")
    (table,) = (each for each in plan.parameters if each.path == ("embedding", "tokens"))
    assert plan.scattered_elements(table) == 256 * 128 * tiles
