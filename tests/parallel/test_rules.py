import pytest
from jax.sharding import PartitionSpec as P

from spmd_lm.axes import MESH_AXES
from spmd_lm.errors import LayoutError
from spmd_lm.parallel.rules import PARAMETERS, Rules, activation_rules


def test_names_become_mesh_axes():
    rules = Rules({"a": ("data", "model"), "b": (), "c": ("pipe",)})
    assert rules.spec(("c", "a", "b", None)) == P(("pipe",), ("data", "model"), None, None)


@pytest.mark.parametrize("names", [("a", "b"), ("a", "a")])
def test_two_dimensions_on_one_mesh_axis_are_refused(names):
    with pytest.raises(LayoutError, match="land on the same mesh axis"):
        Rules({"a": ("data", "model"), "b": ("model",)}).spec(names)


def test_a_name_that_is_in_no_table_is_refused():
    with pytest.raises(KeyError, match="haeds"):
        PARAMETERS.spec(("width", "haeds"))


def test_tensor_parallelism_splits_heads_mlp_and_vocabulary_and_nothing_else():
    assert {name for name, on in PARAMETERS.table.items() if "model" in on} == {"heads", "kv_heads", "mlp", "vocab"}
    assert PARAMETERS.table.keys() == activation_rules(False).table.keys() | {"zero_width"}
    tables = [rules.table for rules in (PARAMETERS, activation_rules(False), activation_rules(True))]
    assert {axis for table in tables for on in table.values() for axis in on} <= set(MESH_AXES)


def test_sequence_parallelism_is_one_row():
    plain, split = activation_rules(False).table, activation_rules(True).table
    assert {name for name in split if split[name] != plain[name]} == {"sequence"}
    assert split["sequence"] == split["heads"]


def test_data_and_model_may_be_several_rings_of_a_mesh():
    on_mesh = PARAMETERS.on_mesh(("pipe", "replica", "data0", "data1", "model0", "model1")).table
    assert on_mesh["zero_width"] == ("data0", "data1") and on_mesh["heads"] == ("model0", "model1")
    assert {name for name, on in on_mesh.items() if on != PARAMETERS.table[name]} == {
        *("zero_width", "zero_width_bytes", "zero_width_blocks", "heads", "kv_heads", "mlp", "vocab"),
        *("expert_zero_width", "experts"),
    }
    assert on_mesh["experts"] == ()
    stream = activation_rules(True).on_mesh(("pipe", "replica", "data0", "data1", "model")).table
    assert stream["batch"] == ("replica", "data0", "data1") and stream["sequence"] == ("model",)
