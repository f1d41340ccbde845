import jax
import numpy as np
import pytest

from spmd_lm.batch import abstract_batch
from spmd_lm.config.schema import RunConfig
from spmd_lm.cost_model.flops import forward_per_sequence, train_step
from spmd_lm.models.language_model import LanguageModel
from spmd_lm.parallel.trees import merge
from spmd_lm.resolve import abstract_plan, make_model
from tests import reference
from tests.helpers import FLOAT32, make_config
from tests.parameter_count import model_parameters, parameters_by_formula

MODELS = {
    "gpt2": {},
    "plain": {"use_bias": False, "tie_embeddings": False},
    "untied": {"tie_embeddings": False, "layers": 3},
    "narrow": {"use_bias": False, "mlp_width": 40, "width": 24, "heads": 3},
    "llama": {"norm_type": "rms", "positions": "rotary", "activation": "swiglu", "kv_heads": 2, "mlp_width": 40},
    "bert": {"kind": "bert", "norm": "post", "token_types": 2},
    "one layer": {"share_layers": True},
}


BERT = {"kind": "bert", "token_types": 2}
FILES = {"source": "task", "path": "a", "validation_path": "b"}
LABELED = {  # an objective, its task, and the weights of its head per row and per token (width 32)
    "classification": ({"kind": "classification", "classes": 5}, "jsonl", (32 + 5) * 32, 0),
    "multiple_choice": ({"kind": "multiple_choice"}, "race", (32 + 1) * 32, 0),
    "span": ({"kind": "span"}, "squad", 0, 2 * 32),
}


def labeled(name: str, **model) -> RunConfig:
    objective, task, *_ = LABELED[name]
    return make_config(model=BERT | model, objective=objective, data=FILES | {"task": task})


@pytest.fixture(params=[*MODELS, *LABELED, "class, norms after, untied"])
def config(request):
    if request.param in LABELED:
        return labeled(request.param)
    if request.param not in MODELS:
        return labeled("classification", norm="post", tie_embeddings=False, use_bias=False)
    masked = {"objective": {"kind": "masked_lm"}} if request.param == "bert" else {}
    return make_config(model=MODELS[request.param], **masked)


def make_shapes(config):
    return LanguageModel(config.model, config.objective, "float32", ("xla",)).shapes


def test_parameters_of_the_model_match_the_formula(config):
    assert parameters_by_formula(config) == model_parameters(config)


def product_flops(jaxpr) -> int:
    """FLOPs of the matrix products in a jaxpr: 2 per multiply-add."""
    flops = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            flops += 2 * equation.outvars[0].aval.size * int(np.prod([shape[d] for d in contracted]))
        flops += sum(product_flops(p.jaxpr) for p in equation.params.values() if hasattr(p, "jaxpr"))
    return flops


def test_flops_match_the_traced_matrix_products(config):
    rows = config.objective.rows_per_example
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[2:]), x.dtype), abstract_batch(config))

    def forward(params, batch):
        return reference.predictions(params, config, batch)

    counted = product_flops(jax.make_jaxpr(forward)(make_shapes(config), one).jaxpr)
    assert rows * forward_per_sequence(config) == counted
    assert rows * train_step(config, abstract_plan(config, 1, "cpu", "cpu")) == 3 * config.train.batch * counted


def test_flops_of_layers_of_several_kinds():
    """Sizes of their own, by the traced products of the reference; of a window its width in place of the row."""
    own = [{"kind": "block", "mlp_width": 40, "heads": 4, "kv_heads": 2}, "block"]
    config = make_config(model={"layers": 3, "period": own})
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape[2:]), x.dtype), abstract_batch(config))
    traced = jax.make_jaxpr(lambda params, batch: reference.predictions(params, config, batch))(
        make_shapes(config), one
    )
    assert forward_per_sequence(config) == product_flops(traced.jaxpr)
    for kind, keys in {"gpt": 5, "bert": 9}.items():
        full, half = (
            forward_per_sequence(make_config(model={"layers": 3, "kind": kind, "period": period}))
            for period in (None, [{"kind": "window", "span": 5}, "block"])
        )
        assert full - half == 2 * 2 * 2 * 16 * 32 * (16 - keys)  # 2 layers, scores and averages, 16 tokens, width 32


MOE = {"kind": "moe", "experts": 8, "per_token": 2}


@pytest.mark.parametrize("capacity", [0.3, 1.25, "none"])
def test_of_experts_those_count_that_a_token_chooses(capacity):
    """Two MLPs in place of one, 24 wide, with their router and a shared one, 40 wide, with its gate; whatever the
    slots, 2 to 16 of 16, and whatever the formulation."""
    own = {"width": 24, "capacity": capacity, "shared": 40, "shared_gate": True}
    keys = {"activation": "swiglu", "use_bias": False}
    dense, experts = make_config(model=keys | {"mlp_width": 24}), make_config(model=keys | {"mlp": MOE | own})
    more = 3 * 32 * (24 + 40) + 32 * (8 + 1)  # multiply-adds of a token in a layer
    assert forward_per_sequence(experts) == forward_per_sequence(dense) + 2 * 2 * 16 * more
    plans = (abstract_plan(each, 1, "cpu", "cpu") for each in (dense, experts))
    steps = [train_step(each, plan) for each, plan in zip((dense, experts), plans, strict=True)]
    assert steps[1] == steps[0] + 3 * 16 * 2 * 2 * 16 * more
    on_tpu = make_config(model=keys | {"mlp": MOE | own}, precision=FLOAT32)
    plan = abstract_plan(on_tpu, 1, "tpu", "TPU v5p")
    assert train_step(on_tpu, plan) == steps[1]
    assert set(make_model(on_tpu, "tpu", plan).expert_products) == {"megablox" if capacity == "none" else "buffers"}


@pytest.mark.parametrize(
    "freeze", ["embedding.* blocks.*", "embedding.tokens *.mlp.*", "head.output_bias *.attention.key"]
)
def test_a_frozen_masked_lm_counts_the_products_that_jax_differentiates(freeze):
    config = make_config(
        model={"kind": "bert", "token_types": 2}, objective={"kind": "masked_lm"}, optim={"freeze": freeze}
    )
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), abstract_batch(config))
    plan, params = abstract_plan(config, 1, "cpu", "cpu"), make_shapes(config)

    def loss(trained, params, batch):
        return reference.loss(merge(params, trained), config, batch, None)

    gradient = jax.make_jaxpr(jax.grad(loss))(plan.trained(params), params, one).jaxpr
    assert train_step(config, plan) == product_flops(gradient)


def test_gpt2_has_the_published_number_of_parameters():
    small = {"layers": 12, "width": 768, "heads": 12, "context": 1024, "vocab": 50257}
    assert model_parameters(make_config(model=small)) == 124_439_808


@pytest.mark.parametrize("name", LABELED)
def test_a_labeled_objective_adds_its_head_as_by_hand(name):
    """2 layers of width 32, MLP 128, context 16, without the vocabulary's product."""
    _, _, per_row, per_token = LABELED[name]
    layer = 4 * 32 * 32 + 2 * 32 * 128
    assert forward_per_sequence(labeled(name)) == 2 * (16 * (2 * (layer + 2 * 16 * 32) + per_token) + per_row)
    scales, bias_count = (2 * 2 + 1) * 32, 2 * (4 * 32 + 128 + 32) + (per_row + per_token) // 32
    without = 2 * layer + (61 + 16 + 2) * 32 + scales + per_row + per_token
    assert model_parameters(labeled(name, use_bias=False)) == without
    assert model_parameters(labeled(name)) == without + bias_count + scales  # a norm has as many biases
