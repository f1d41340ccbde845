import jax
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from spmd_lm.axes import MESH_AXES
from spmd_lm.errors import LayoutError
from spmd_lm.parallel.rules import PARAMETERS, Rules, activation_rules, rules_on_mesh


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
    assert {name for name, on in PARAMETERS.table.items() if "model" in on} == {"heads", "mlp", "vocab"}
    assert PARAMETERS.table.keys() == activation_rules(False).table.keys() | {"zero_width"}
    tables = [rules.table for rules in (PARAMETERS, activation_rules(False), activation_rules(True))]
    assert {axis for table in tables for on in table.values() for axis in on} <= set(MESH_AXES)


def test_sequence_parallelism_is_one_row():
    plain, split = activation_rules(False).table, activation_rules(True).table
    assert {name for name in split if split[name] != plain[name]} == {"sequence"}
    assert split["sequence"] == split["heads"]


def test_data_may_be_several_rings_of_a_mesh():
    table = PARAMETERS.with_data_axes(("data0", "data1")).table
    assert table["zero_width"] == ("data0", "data1")
    assert activation_rules(False).with_data_axes(("data0", "data1")).table["batch"] == ("replica", "data0", "data1")
    assert {name: on for name, on in table.items() if name != "zero_width"} == {
        name: on for name, on in PARAMETERS.table.items() if name != "zero_width"
    }


TENSOR = {"heads": "model", "mlp": "model", "vocab": "model"}


def mesh(kind: AxisType) -> AbstractMesh:
    return AbstractMesh((4, 2), ("data", "model"), axis_types=(kind, kind))


def test_rules_of_one_s_own_shard_what_they_name():
    rules = rules_on_mesh(mesh(AxisType.Explicit), TENSOR | {"batch": ("data",)})
    assert rules.axes("heads") == ("model",) and rules.axes("batch") == ("data",) and rules.axes("width") == ()
    assert rules.sizes == {"data": 4, "model": 2}


@pytest.mark.parametrize(
    ("kind", "axes", "message"),
    [
        (AxisType.Explicit, {"haeds": "model"}, "'haeds' is no dimension that can be sharded; they are batch"),
        (AxisType.Explicit, {"heads": "tensor"}, "heads='tensor' is no axis of the mesh; it has data, model."),
        (AxisType.Explicit, TENSOR | {"batch": ("data", "model")}, "heads shares an axis of the mesh with batch"),
        (AxisType.Auto, {"heads": "model"}, "that is not Explicit. Make the mesh with jax.make_mesh"),
        (AxisType.Explicit, TENSOR | {"sequence": "data"}, "the same axes as heads, mlp and vocab"),
    ],
    ids=str,
)
def test_rules_that_no_model_can_follow_are_refused(kind, axes, message):
    with pytest.raises(LayoutError) as error:
        rules_on_mesh(mesh(kind), axes)
    assert message in str(error.value)


def test_rules_without_a_mesh_are_refused():
    with pytest.raises(LayoutError, match=r"there is none: enter jax.set_mesh\(mesh\)"):
        rules_on_mesh(jax.sharding.get_abstract_mesh(), {"heads": "model"})
