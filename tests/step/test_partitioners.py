"""XLA's collectives and those written out compute the same run: each is the other's oracle, in float64."""

import jax
import pytest

from spmd_lm.config.checks import problems
from tests.helpers import ORIGINAL_BERT, TASKS, partitioned, program, run_of, trained
from tests.step.test_train_step import LLAMA, assert_same_run

pytestmark = pytest.mark.usefixtures("x64")
slow = pytest.mark.slow


PARTITIONERS = ("types", "manual")
BERT = {"model": ORIGINAL_BERT | {"activation": "gelu"}}
ORDER = {"objective": {"kind": "masked_lm", "sentence_order": True}}
GROUPED = {"model": LLAMA | {"use_bias": False, "tie_embeddings": False}}
CASES = [
    ("data4-model2", 1, "scan", "none", {}),
    ("data4-model2-zero2", 2, "scan", "none", {}),
    ("replica2-data2-model2-sequence-zero3", 2, "scan", "full", {}),
    pytest.param("one", 2, "unrolled", "none", {}, marks=slow),
    pytest.param("data8", 2, "unrolled", "residual", {}, marks=slow),
    pytest.param("model8-sequence", 1, "unrolled", "selective", {}, marks=slow),
    pytest.param("data8-zero3", 1, "unrolled", "selective", {}, marks=slow),
    pytest.param("data4-zero3-once", 2, "scan", "full", {}, marks=slow),
    pytest.param("data2-model4-sequence-zero1", 2, "unrolled", "none", {}, marks=slow),
    pytest.param("data4-model2-sequence", 2, "scan", "none", BERT | ORDER, marks=slow),
    pytest.param("data2-model4-zero3", 2, "scan", "selective", GROUPED, marks=slow),
    pytest.param("data2-model4-sequence-zero1", 2, "scan", "none", BERT | TASKS["classification"], marks=slow),
    pytest.param("data2-model4-sequence-zero1", 1, "scan", "none", BERT | TASKS["multiple choice"], marks=slow),
    pytest.param("data4-model2-sequence", 1, "unrolled", "none", BERT | TASKS["span"], marks=slow),
    pytest.param("data4-model2-zero2", 2, "scan", "none", {"model": {"share_layers": True}}, marks=slow),
]


@pytest.mark.parametrize(("layout", "microbatches", "form", "remat", "sections"), CASES, ids=str)
def test_both_compute_the_same_run(layout, microbatches, form, remat, sections):
    config = run_of(layout, microbatches, form, remat, **sections)
    types, manual = (trained(partitioned(config, partitioner)) for partitioner in PARTITIONERS)
    assert_same_run(types, manual)


def test_a_step_of_types_is_traced_on_global_arrays():
    """Its products are outside of every shard_map, and a manual step's inside of one."""
    products = {}
    for partitioner in PARTITIONERS:
        p = program(partitioned(run_of("data4-model2"), partitioner))
        jaxpr = p.train_step.trace(p.abstract_state(), p.abstract_batch()).jaxpr.jaxpr
        products[partitioner] = count(jaxpr, "dot_general", without="shard_map")
    assert products["types"] >= 3 * 6  # forward and backward of six matrices
    assert products["manual"] == 0


def count(jaxpr: jax.extend.core.Jaxpr, primitive: str, without: str) -> int:
    """Equations of a primitive, those inside of another one left out."""
    total = 0
    for equation in jaxpr.eqns:
        total += equation.primitive.name == primitive
        if equation.primitive.name != without:
            inner = jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns"))
            jaxprs = [getattr(x, "jaxpr", x) for x in inner]
            total += sum(count(x, primitive, without) for x in jaxprs if hasattr(x, "eqns"))
    return total


def test_a_pipeline_of_types_is_refused():
    config = partitioned(run_of("one"), "types")
    parallel = config.parallel.model_copy(update={"pipe": 2})
    sections = {name: getattr(config, name) for name in type(config).model_fields} | {"parallel": parallel}
    (problem,) = [p for p in problems(sections) if "partitioner" in p]
    assert problem.startswith("parallel.partitioner=types with parallel.pipe=2: ")
    assert problem.endswith("parallel.partitioner=auto.")
