"""A layer's trace beside the compiled step: FLOPs of its products, and the stacks that its loops carry."""

from collections import Counter

import jax
import pytest

from spmd_lm.analysis.compiled_flops import compiled_flops
from spmd_lm.analysis.hlo import HloModule
from spmd_lm.config.load import load
from spmd_lm.config.schema import RunConfig
from spmd_lm.cost_model.dataflow import PRODUCTS, Dataflow, equations
from spmd_lm.cost_model.layer_trace import trace_layer, trace_layers
from spmd_lm.errors import ConfigError
from spmd_lm.ops.dense_attention import query_blocks
from spmd_lm.resolve import abstract_plan
from spmd_lm.step.program import Program
from tests.config.test_shipped import CONFIGS, SHIPPED, name_of
from tests.helpers import diagonals, make_config

PERIODS = 2
POLICIES = ("none", "selective", "residual", "full")
ONE_DEVICE = [
    *("parallel.pipe=1", "parallel.replica=1", "parallel.data=1", "parallel.model=1", "parallel.sequence=false"),
    *("parallel.zero=0", "parallel.chunks=1", "parallel.schedule=1f1b", "parallel.microbatches=1"),
    *("precision.compute=float32", "precision.params=float32", "precision.reduce=float32"),
    *("model.scan=true", "model.attention=xla", "model.vocab=512", "train.batch=1"),
    *("parallel.partitioner=manual", "run.simulate_devices=1"),
]


def shipped_layers() -> dict[str, RunConfig]:
    """A configuration for each distinct shape of a shipped layer, two periods deep."""
    found = {}
    for path in SHIPPED:
        try:
            periods = len(load(str(path), ONE_DEVICE).model.kinds)
            config = load(str(path), [*ONE_DEVICE, f"model.layers={PERIODS * periods}"])
        except ConfigError:  # of a row for each choice, or a loss scale: models that others have too
            continue
        found.setdefault(repr((config.model, config.adapter, config.objective)), (name_of(path), config))
    return dict(found.values())


LAYERS = shipped_layers()


def compiled_layers(config: RunConfig) -> tuple[float, float]:
    """Of all layers of the compiled step: FLOPs of its products, forward and backward, and bytes that forward saves."""
    program = Program(config, jax.devices()[:1])
    state = program.abstract_state()
    module = HloModule(program.train_step.lower(state, program.abstract_batch()).compile().as_text())
    stacks = Counter(x.shape for x in jax.tree.leaves(state.params["blocks"]))
    of_loops = []
    for each in [each for instructions in module.computations.values() for each in instructions]:
        carried = [x for x in each.arrays if x.dims[:1] == (PERIODS,)] if each.opcode == "while" else []
        if len(carried) >= stacks.total():
            module.entry = each.attribute("body")
            of_loops.append((PERIODS * compiled_flops(module), carried))
    (forward, carried), (backward, _) = of_loops
    saved = 0
    for array in carried:
        stacks[array.dims] -= 1
        saved += array.bytes * (stacks[array.dims] < 0 and len(array.dims) > 1)
    return forward + backward, saved


QUICK = {("debug", "residual")}


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in sorted({*diagonals(LAYERS, POLICIES, 2), *QUICK})
    ],
)
def test_a_trace_is_what_the_compiled_step_runs_and_saves(name, policy):
    config = LAYERS[name]
    config = config.model_copy(update={"remat": config.remat.model_copy(update={"policy": policy})})
    plan = Program(config, jax.devices()[:1]).plan
    flops, saved = compiled_layers(config)
    traces = [trace_layer(each, plan) for each in config.of_each_kind]
    assert PERIODS * sum(each.forward.product_flops + each.backward.product_flops for each in traces) == pytest.approx(
        flops, rel=0.02
    )
    assert PERIODS * sum(each.saved for each in traces) == pytest.approx(saved, rel=0.02)


@pytest.mark.slow
def test_several_rows_cost_as_much_as_their_step():
    """What does not grow with them counts once."""
    overrides = [*ONE_DEVICE, f"model.layers={PERIODS}", "train.batch=3", "model.attention_dropout=0"]
    config = load(str(CONFIGS / "debug.yaml"), overrides)
    traced = trace_layer(config, Program(config, jax.devices()[:1]).plan)
    flops, saved = compiled_layers(config)
    products = [each for one in (traced.forward, traced.backward) for each in one.products]
    assert PERIODS * sum(each.times * each.of_rows(3).flops for each in products) == pytest.approx(flops, rel=0.01)
    assert PERIODS * (3 * traced.saved + traced.saved_once) == pytest.approx(saved, rel=0.01)


def test_attention_of_one_head_is_not_a_gradient_of_weights():
    config = load(str(CONFIGS / "debug.yaml"), ["run.simulate_devices=0", "model.heads=8", "parallel.model=8"])
    traced = trace_layer(config, abstract_plan(config, 8, "gpu", ""))
    heads = [each for each in traced.forward.products if each.per_row == "batch"]
    assert sum(each.times for each in heads) == 2 * len(query_blocks(config.model.context, True, None))
    assert {each.product.batch for each in heads} == {1}


def test_a_frozen_kind_of_layer_is_not_trained():
    period = [{"kind": "window", "span": 4}, {"kind": "block", "mlp_width": 96}]
    model = {"layers": 4, "period": period, "attention": "xla"}
    config = make_config(model=model, optim={"freeze": "blocks.0.* blocks.2.*"})
    (_, _, frozen), (_, _, trained) = trace_layers(config, abstract_plan(config, 1, "gpu", ""))
    one, two = (each.backward.product_flops / each.forward.product_flops for each in (frozen, trained))
    assert 1 < one < 1.1 and two == 2  # attention has no weights: two products for each


def test_of_a_conditional_the_costliest_branch_counts():
    """And within a loop as often as that runs."""

    def f(p, x):
        once = jax.lax.cond(p, lambda x: x, lambda x: x @ x, x)
        return once + jax.lax.scan(lambda y, _: (jax.lax.cond(p, lambda y: y @ y, lambda y: y, y), None), x, None, 5)[0]

    shapes = jax.ShapeDtypeStruct((), bool), jax.ShapeDtypeStruct((4, 4), "float32")
    flow = Dataflow(jax.make_jaxpr(f)(*shapes), ["p", "x"], gradient="")
    counts = [
        times for each in flow.operations for e, times in equations(each.equation) if e.primitive.name in PRODUCTS
    ]
    assert counts == [1, 5]
