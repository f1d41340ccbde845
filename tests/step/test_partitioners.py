"""Steps whose collectives XLA inserts, beside those that write them out; test_train_step.py has the matrix of both."""

from collections.abc import Iterator

import jax
import pytest

from spmd_lm.config.checks import problems
from tests.helpers import FLOAT32, Outcome, assert_close, partitioned, program, run_of, trained

pytestmark = pytest.mark.usefixtures("x64")
slow = pytest.mark.slow
PARTITIONERS = ("types", "manual")


def both(layout: str, **sections: dict) -> Iterator[Outcome]:
    config = run_of(layout, 2, **sections)
    return (trained(partitioned(config, partitioner)) for partitioner in PARTITIONERS)


@slow
def test_lion_and_a_guard_against_spikes_compute_the_same_run():
    """Biases are off: the sign of a key bias's gradient, zero in exact arithmetic, is rounding's."""
    sections = {"model": {"use_bias": False}, "optim": {"kind": "lion"}, "train": {"guard": {"spikes": True}}}
    types, manual = both("data4-model2-zero2", **sections)
    assert types.losses == pytest.approx(manual.losses, rel=1e-12)
    assert_close(types.last.params, manual.last.params, 1e-11)
    assert_close(types.last.opt_state.mu, manual.last.opt_state.mu, 1e-11)


@slow
@pytest.mark.parametrize(
    "compute",
    [{"compute": "bfloat16"}, {"compute": "float16", "loss_scale": "dynamic", "initial_scale": 2.0**10}],
    ids=["bfloat16", "float16"],
)
def test_16_bits_round_both_by_as_much(compute):
    types, manual = both("data4-model2", precision=FLOAT32 | compute)
    assert types.losses == pytest.approx(manual.losses, rel=2**-8)
    assert types.norms == pytest.approx(manual.norms, rel=2**-6)


def test_a_step_of_types_is_traced_on_global_arrays():
    """The matmuls are outside every shard_map; those of a manual step are inside one."""
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
