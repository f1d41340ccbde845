import jax
import pytest
from jax.sharding import AbstractMesh, AxisType

from spmd_lm.active_rules import AxisRules, num_shards, use_axis_rules
from spmd_lm.errors import LayoutError
from spmd_lm.parallel.own_mesh import param_shardings, rules_on_mesh

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
        (AxisType.Explicit, {"width": "model"}, "'width' is no dimension that can be sharded; they are batch"),
        (AxisType.Explicit, {"heads": "tensor"}, "heads='tensor' is no axis of the mesh; it has data, model."),
        (AxisType.Explicit, TENSOR | {"batch": ("data", "model")}, "heads shares an axis of the mesh with batch"),
        (AxisType.Auto, {"heads": "model"}, "axes that are not Explicit: data, model. Make it with jax.make_mesh"),
        (AxisType.Explicit, TENSOR | {"sequence": "data"}, "the same axes as heads, mlp and vocab"),
        (AxisType.Explicit, TENSOR | {"heads": ("model", "model")}, "heads names an axis of the mesh twice"),
        (AxisType.Explicit, {"batch": "data", "zero": "model"}, "zero names model, which is no axis of batch"),
        (AxisType.Explicit, {"zero": "data"}, "zero names data, which is no axis of batch"),
    ],
    ids=str,
)
def test_rules_that_no_model_can_follow_are_refused(kind, axes, message):
    with pytest.raises(LayoutError) as error:
        rules_on_mesh(mesh(kind), axes)
    assert message in str(error.value)


def test_a_rule_of_a_dimension_that_the_model_does_not_have_is_refused():
    """User modules may have others."""
    devices = jax.make_mesh((1, 1), ("data", "model"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:1])
    names, shapes = {"w": ("width", "state")}, {"w": jax.ShapeDtypeStruct((8, 8), "float32")}
    with jax.set_mesh(devices), use_axis_rules(rules_on_mesh(devices.abstract_mesh, {"state": "model"})):
        assert param_shardings(names, shapes, {"state"})["w"].mesh == devices
        with pytest.raises(LayoutError, match=r"axis_rules\(state=\.\.\.\) is of a dimension that this model does not"):
            param_shardings(names, shapes)


def test_every_axis_of_the_mesh_is_explicit():
    mixed = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Explicit))
    with pytest.raises(LayoutError, match="axes that are not Explicit: data"):
        rules_on_mesh(mixed, TENSOR)


def test_rules_without_a_mesh_are_refused():
    with pytest.raises(LayoutError, match=r"there is no mesh: enter jax.set_mesh\(mesh\)"):
        rules_on_mesh(jax.sharding.get_abstract_mesh(), {"heads": "model"})


def test_shardings_without_a_mesh_are_refused():
    with pytest.raises(LayoutError, match=r"enter jax.set_mesh\(mesh\) and spmd_lm.axis_rules\(...\)"):
        param_shardings({}, {})


@pytest.mark.parametrize(
    ("axes", "width", "what", "shards"),
    [
        ({"vocab": "model"}, 8, "'vocab' of size 61", 2),
        ({"batch": "data", "zero": "data"}, 30, "'width' of size 30", 4),
    ],
)
def test_sizes_that_the_mesh_does_not_divide_are_refused(axes, width, what, shards):
    devices = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    names = {"scale": ("layers", "width"), "table": ("vocab", "width")}
    shapes = {name: jax.ShapeDtypeStruct((size, width), "float32") for name, size in (("scale", 2), ("table", 61))}
    rules = rules_on_mesh(mesh(AxisType.Explicit), axes)
    with jax.set_mesh(devices), use_axis_rules(rules), pytest.raises(LayoutError) as error:
        param_shardings(names, shapes)
    problem, advice = error.value.problems
    assert problem == f"dimension {what} is not divisible by the {shards} devices of its axes."
    assert advice.startswith("Only spmd-lm train pads")


def test_other_rules_trace_a_function_again():
    shards = jax.jit(lambda: num_shards("heads"))
    for sizes in ({"model": 2}, {"model": 4}, {"model": 2}):
        with use_axis_rules(AxisRules({"heads": ("model",)}, sizes)):
            assert shards() == sizes["model"]
    assert shards() == 1
    assert shards._cache_size() == 3  # equal rules are one key
