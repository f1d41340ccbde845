"""Models under the caller's jit, mesh and rules."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import spmd_lm
from spmd_lm.analysis.compiled_collectives import collective_instructions
from spmd_lm.analysis.hlo import HloModule
from spmd_lm.errors import LayoutError
from tests import reference
from tests.helpers import FLOAT32, ORIGINAL_BERT, assert_close, host_batch, make_config, relative
from tests.own import MIXER, example, write_module

ROOT = Path(__file__).parents[1]
TENSOR = {"heads": "model", "mlp": "model", "vocab": "model"}
RULES = TENSOR | {"batch": "data"}
ZERO = RULES | {"zero": "data"}
SIZES = {"vocab": 62, "dropout": 0.2, "attention_dropout": 0.1}
GPT = {"model": SIZES}
BERT = {
    "model": SIZES | ORIGINAL_BERT | {"activation": "gelu"},
    "objective": {"kind": "masked_lm", "sentence_order": True},
}
PERIOD = {"layers": 3, "period": [{"kind": "window", "span": 4}, {"kind": "block", "heads": 4, "mlp_width": 40}]}
slow = pytest.mark.slow


def mesh_of(shape: tuple[int, int]) -> jax.sharding.Mesh:
    devices = jax.devices()[: shape[0] * shape[1]]
    return jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Explicit,) * 2, devices=devices)


def computed(rules: dict, shape: tuple[int, int], sections: dict) -> tuple[jax.Array, dict, jax.Array]:
    """Loss, gradients and logits of the first batch on a mesh of data x model."""
    config = make_config(**sections)
    model = spmd_lm.make_model(config)
    mesh = mesh_of(shape)
    with jax.set_mesh(mesh), spmd_lm.axis_rules(**rules):
        params = jax.device_put(model.init(0), spmd_lm.param_shardings(model))
        batch = jax.device_put(host_batch(config, 0), NamedSharding(mesh, P(rules.get("batch"))))

        @jax.jit
        def step(params, batch):
            loss, gradients = jax.value_and_grad(functools.partial(model.mean_loss, dropout=(3, 0)))(params, batch)
            return loss, gradients, model.forward(params, batch)

        return jax.tree.map(np.asarray, step(params, batch))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("rules", "sections"),
    [
        pytest.param(RULES, GPT, id="tensor", marks=slow),
        pytest.param(RULES | {"sequence": "model"}, GPT, id="sequence", marks=[slow, pytest.mark.mutants]),
        pytest.param(RULES | {"sequence": "model"}, BERT, id="bert", marks=slow),
        pytest.param(RULES, {"model": SIZES | {"scan": False}}, id="unrolled", marks=slow),
        pytest.param({}, GPT, id="nothing", marks=slow),
        pytest.param({"batch": "data"}, GPT, id="rows", marks=slow),
        pytest.param({"batch": ("data", "model")}, GPT, id="rows over both", marks=slow),
        pytest.param(TENSOR, GPT, id="weights", marks=slow),
        pytest.param(RULES | {"sequence": "model"}, {"model": SIZES | PERIOD}, id="several kinds", marks=slow),
        pytest.param(ZERO, GPT, id="zero", marks=slow),
        pytest.param(ZERO | {"sequence": "model"}, BERT, id="zero, bert", marks=slow),
        pytest.param(ZERO | {"sequence": "model"}, {"model": SIZES | PERIOD}, id="zero, several kinds", marks=slow),
        pytest.param(
            ZERO, {"model": SIZES | {"scan": False, "tie_embeddings": False}}, id="zero, unrolled", marks=slow
        ),
        pytest.param(ZERO, GPT | {"remat": {"policy": "full"}}, id="zero, remat", marks=slow),
        pytest.param(ZERO, {"model": SIZES | {"share_layers": True}}, id="zero, shared layers", marks=slow),
        pytest.param({"batch": ("data", "model"), "zero": "model"}, GPT, id="zero, replicas", marks=slow),
        pytest.param({"batch": ("data", "model"), "zero": ("data", "model")}, GPT, id="zero over both", marks=slow),
    ],
)
def test_what_is_computed_does_not_depend_on_the_mesh(rules, sections):
    loss, gradients, logits = computed(rules, (4, 2), sections)
    loss_alone, gradients_alone, logits_alone = computed(RULES, (1, 1), sections)
    assert loss == pytest.approx(loss_alone, rel=1e-12)
    assert_close(gradients, gradients_alone, 1e-11)
    assert_close(logits, logits_alone, 1e-11)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rules", "source"),
    [(ZERO | {"sequence": "model"}, example("GPTJBlock")), (ZERO | {"state": "model"}, MIXER)],
    ids=["GPTJBlock", "Mixer"],
)
def test_blocks_of_ones_own_compute_the_same_too(x64, tmp_path, rules, source):
    name = "Mixer" if source == MIXER else "GPTJBlock"
    sections = {"model": SIZES | {"module": write_module(tmp_path, name, source)}}
    loss, gradients, logits = computed(rules, (4, 2), sections)
    alone = RULES | dict.fromkeys({"state"} & rules.keys())
    loss_alone, gradients_alone, logits_alone = computed(alone, (1, 1), sections)
    assert loss == pytest.approx(loss_alone, rel=1e-12)
    assert_close(gradients, gradients_alone, 1e-11)
    assert_close(logits, logits_alone, 1e-11)


@slow
def test_layers_of_several_kinds_have_the_loss_and_the_logits_of_the_reference(x64):
    """The last period is cut short; layers have different dropout masks."""
    config = make_config(model=SIZES | PERIOD)
    model = spmd_lm.make_model(config)
    params, batch = model.init(0), host_batch(config, 0)
    with jax.set_mesh(mesh_of((1, 1))), spmd_lm.axis_rules(**RULES):
        loss = jax.jit(functools.partial(model.mean_loss, dropout=(3, 0)))(params, batch)
        logits = jax.jit(model.forward)(params, batch)
    dropout = reference.Dropout((3, 0), batch.sample_ids)
    assert loss == pytest.approx(float(reference.loss(params, config, batch, dropout)), rel=1e-12)
    want = reference.predictions(params, config, batch)["causal_lm"]
    assert relative(logits["tokens"][..., : SIZES["vocab"]], want) < 1e-12


def test_a_parameter_that_is_not_laid_out_is_named():
    model = spmd_lm.make_model(
        make_config(model=SIZES, precision=dict.fromkeys(("params", "compute", "reduce"), "float32"))
    )
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh), spmd_lm.axis_rules(**RULES), pytest.raises(LayoutError) as error:
        batch = jax.device_put(host_batch(make_config(model=SIZES), 0), NamedSharding(mesh, P("data")))
        jax.jit(model.mean_loss)(model.init(0), batch)
    first, *_, advice = error.value.problems
    assert first.startswith("blocks.attention.key is laid out as ") and "'model'" in first
    assert advice == "Write jax.device_put(params, spmd_lm.param_shardings(model))."


SEQUENCE = RULES | {"sequence": "model"}


@pytest.mark.parametrize(
    ("sizes", "rules", "sharded", "message"),
    [
        ({}, RULES, False, "tokens is laid out as"),
        ({}, TENSOR, True, "tokens is laid out as"),
        ({"heads": 6}, RULES, True, "model.heads=6 cannot be divided by the 4 shards of 'heads'"),
        ({"context": 15}, SEQUENCE, True, "the batch's sequences, 15 tokens long, cannot be divided by the 4 shards"),
    ],
    ids=["batch on no device", "batch in no rule", "heads", "sequence"],
)
def test_what_would_be_computed_wrong_is_refused(sizes, rules, sharded, message):
    config = make_config(model=SIZES | {"width": 48, "vocab": 64} | sizes, precision=FLOAT32)
    model, mesh = spmd_lm.make_model(config), mesh_of((2, 4))
    with jax.set_mesh(mesh), spmd_lm.axis_rules(**rules), pytest.raises(LayoutError) as error:
        params = jax.device_put(model.init(0), spmd_lm.param_shardings(model))
        batch = host_batch(config, 0)
        batch = jax.device_put(batch, NamedSharding(mesh, P("data"))) if sharded else batch
        jax.eval_shape(model.mean_loss, params, batch)
    assert error.value.problems[0].startswith(message)


def test_a_step_outside_of_the_rules_is_refused():
    config = make_config(model=SIZES, precision=FLOAT32)
    model = spmd_lm.make_model(config)
    with jax.set_mesh(mesh_of((4, 2))), pytest.raises(LayoutError, match="there are no rules"):
        jax.eval_shape(model.mean_loss, model.init(0), host_batch(config, 0))


def laid_out(sizes: dict | None = None, policy: str = "none") -> tuple:
    """A model, and its parameters and batch by the rules of this context."""
    config = make_config(model=SIZES | (sizes or {}), precision=FLOAT32, remat={"policy": policy})
    model, mesh = spmd_lm.make_model(config), jax.sharding.get_mesh()
    params = jax.device_put(model.init(0), spmd_lm.param_shardings(model))
    return model, params, jax.device_put(host_batch(config, 0), NamedSharding(mesh, P("data")))


def test_a_backward_outside_of_the_rules_is_refused():
    with jax.set_mesh(mesh_of((8, 1))):
        with spmd_lm.axis_rules(batch="data"):
            model, params, batch = laid_out()

        def loss(params, batch):
            with spmd_lm.axis_rules(batch="data"):
                return model.mean_loss(params, batch)

        with pytest.raises(LayoutError, match="and what differentiates it"):
            jax.eval_shape(jax.grad(loss), params, batch)


@pytest.mark.mutants
def test_gradients_of_reduced_parameters_wait_for_their_sum():
    with jax.set_mesh(mesh_of((8, 1))), spmd_lm.axis_rules(batch="data"):
        model, params, batch = laid_out()
        params = jax.reshard(params, P(reduced={"data"}))
        program = jax.jit(jax.grad(model.mean_loss)).lower(params, batch).compile().as_text()
    sums = [line for line in program.splitlines() if " all-reduce(" in line]
    assert sums and not any("[32,32]" in line for line in sums), "a matrix is 32 x 32"


DEEP = {"layers": 12, "width": 64}


def compiled_gradients(rules: dict, policy: str = "none") -> jax.stages.Compiled:
    """Gradients of a deep model on data 8."""
    with jax.set_mesh(mesh_of((8, 1))), spmd_lm.axis_rules(batch="data", **rules):
        model, params, batch = laid_out(DEEP, policy)
        return jax.jit(jax.grad(model.mean_loss)).lower(params, batch).compile()


@pytest.mark.parametrize("policy", ["none", pytest.param("full", marks=slow)])
def test_under_zero_each_layer_gathers_forward_and_backward(policy):
    """A layer has 6 matrices; outside of the loop are the table of tokens, twice, and that of positions."""
    module = HloModule(compiled_gradients({"zero": "data"}, policy).as_text())
    found = [i for i in collective_instructions(module, 8) if i.wire_bytes and i.full_bytes >= 4 * 16 * DEEP["width"]]

    def arrays(kind: str, times: int) -> int:
        return sum(i.num_arrays for i in found if (i.kind, i.count) == (kind, times))

    assert (arrays("all-gather", DEEP["layers"]), arrays("reduce-scatter", DEEP["layers"])) == (2 * 6, 6)
    assert (arrays("all-gather", 1), arrays("reduce-scatter", 1)) == (3, 3)
    assert not [i for i in found if i.kind not in ("all-gather", "reduce-scatter")]


@slow
@pytest.mark.parametrize("policy", ["none", "full"])
def test_under_zero_no_stack_of_gathered_weights_is_held(policy):
    """A gathered stack would be 12 layers more than without ZeRO, and a copy of its shards 1.5 layers."""
    layer = 12 * DEEP["width"] ** 2 * 4
    without, with_zero = (compiled_gradients(rules, policy).memory_analysis() for rules in ({}, {"zero": "data"}))
    assert with_zero.argument_size_in_bytes < without.argument_size_in_bytes / 6
    assert with_zero.output_size_in_bytes < without.output_size_in_bytes / 6
    assert with_zero.temp_size_in_bytes < without.temp_size_in_bytes + layer / 8


@slow
def test_a_model_is_made_sharded_over_zero():
    with jax.set_mesh(mesh_of((4, 2))), spmd_lm.axis_rules(**ZERO):
        model, params, _ = laid_out()
        shardings = spmd_lm.param_shardings(model)
        made = jax.jit(lambda: model.init(0), out_shardings=shardings)()
    assert_close(made, params, 1e-6)
    assert shardings["blocks"]["mlp"]["up"].spec == P(None, ("data",), ("model",))
    assert shardings["embedding"]["tokens"].spec == P(("model",), ("data",))
    assert shardings["blocks"]["norm1"]["scale"].spec == P(None, None)


def test_rules_of_another_mesh_are_refused():
    with jax.set_mesh(mesh_of((4, 2))):
        rules = spmd_lm.axis_rules(**RULES)
    with jax.set_mesh(mesh_of((2, 4))), rules, pytest.raises(LayoutError, match="the rules are for a mesh of"):
        model, params, batch = laid_out()
        jax.eval_shape(model.mean_loss, params, batch)


@slow
@pytest.mark.parametrize("zero", ["", ', zero="data"'])
def test_the_example_trains_to_the_losses_of_train(zero, tmp_path):
    """The mesh is data 4 x model 2, with dropout, in float64."""
    example = tmp_path / "own_loop.py"
    example.write_text((ROOT / "docs/examples/own_loop.py").read_text().replace('batch="data"', 'batch="data"' + zero))
    keys = {f"precision.{what}": "float64" for what in ("params", "compute", "reduce")}
    keys |= {"run.simulate_devices": 8, "parallel.model": 2, "train.steps": 10}
    keys |= {"model.dropout": 0.1, "model.attention_dropout": 0.1}
    keys |= {"optim.decay": "constant", "optim.warmup": 0, "optim.min_lr": 0, "optim.weight_decay": 0}
    overrides = [f"{key}={value}" for key, value in keys.items()]

    def run(*command: str) -> str:
        env = os.environ | {"XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
        return subprocess.run(
            [sys.executable, *command, *overrides], cwd=ROOT, env=env, check=True, capture_output=True, text=True
        ).stdout

    losses = [float(line) for line in run(str(example)).split()]
    run("-m", "spmd_lm", "train", "configs/debug.yaml", f"run.dir={tmp_path}")
    records = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert losses == pytest.approx([record["loss"] for record in records if "loss" in record], rel=1e-12)
    assert len(losses) == 10


def test_the_example_is_short():
    import ast

    tree = ast.parse((ROOT / "docs/examples/own_loop.py").read_text())
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    imports = [node for node in statements if isinstance(node, (ast.Import, ast.ImportFrom))]
    documentation = 1
    assert len(statements) - len(imports) - documentation <= 20
