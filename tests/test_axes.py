import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from spmd_lm import axes
from spmd_lm.parallel.mesh import Layout, make_mesh

RULES = {"batch": (), "heads": ("model",), "both": ("data", "model"), "alone": ("pipe",)}
LAYOUT = Layout(data=2, model=4)


def run(f, *args):
    placement = axes.Placement(RULES, LAYOUT.sizes)
    with jax.set_mesh(make_mesh(LAYOUT, jax.devices())), axes.placed(placement):
        return jax.jit(lambda *args: f(*args))(*args)


def test_a_constraint_places_an_array():
    x = jnp.ones((8, 8, 8))
    assert run(lambda x: axes.constrain(x, "batch", "heads", None), x).sharding.spec == P(None, ("model",))
    assert run(lambda x: axes.constrain(x, None, None, "both"), x).sharding.spec == P(None, None, ("data", "model"))
    with pytest.raises(KeyError, match="haeds"):
        run(lambda x: axes.constrain(x, "haeds"), x)


def test_each_device_sees_its_own_part_and_what_the_others_make_of_theirs():
    def local(x):
        assert x.shape == (1,)
        places = [axes.index(name) for name in ("both", "heads", "alone")]
        sums = [axes.total(x[0], name) for name in ("both", "heads", "alone")]
        return jnp.stack([*places, *sums, axes.maximum(x[0], "heads")])[None]

    got = run(lambda x: axes.per_shard(local, ("both",), ("both", None))(x), jnp.arange(8, dtype=jnp.int32) ** 2)
    squares = np.arange(8) ** 2
    halves = squares.reshape(2, 4).repeat(4, axis=0)
    want = [range(8), [0, 1, 2, 3] * 2, [0] * 8, [squares.sum()] * 8, halves.sum(1), squares, halves.max(1)]
    np.testing.assert_array_equal(got, np.transpose([list(column) for column in want]))


def test_parts_are_counted_where_there_are_devices():
    assert run(lambda: [jnp.int32(axes.shards(name)) for name in RULES]) == [1, 4, 8, 1]


def test_with_no_placement_every_array_is_whole():
    x = jnp.arange(3)
    assert axes.constrain(x, "anything") is x
    assert axes.shards("heads") == 1 and int(axes.index("heads")) == 0
    assert axes.total(x, "heads") is x and axes.maximum(x, "heads") is x
    local = lambda x: x  # noqa: E731
    assert axes.per_shard(local, ("heads",), ("heads",)) is local


def test_names_are_told_from_containers():
    assert axes.is_names(("heads", None)) and axes.is_names(())
    assert not axes.is_names((("heads",), None)) and not axes.is_names(["heads"])
