import pytest
from jax.sharding import PartitionSpec as P

from spmd_lm.axes import MESH_AXES
from spmd_lm.errors import LayoutError
from spmd_lm.parallel.rules import ACTIVATIONS, PARAMETERS, Rules


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
    assert PARAMETERS.table.keys() == ACTIVATIONS.table.keys()
    assert {axis for rules in (PARAMETERS, ACTIVATIONS) for on in rules.table.values() for axis in on} <= set(MESH_AXES)
