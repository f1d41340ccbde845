"""Kinds of layers in a configuration: what they have of their own, and what is wrong with them."""

import pytest

from spmd_lm.config.attention_kernels import choose_kernel
from spmd_lm.config.load import load
from spmd_lm.config.rope import LinearRope
from spmd_lm.errors import ConfigError
from spmd_lm.models.transformer import make_rotary
from spmd_lm.ops.rotary import Rotary
from tests.helpers import FLOAT32, make_config

WINDOW = "{kind: window, span: 8}"
DYNAMIC = "{kind: dynamic, factor: 2, original_context: 8}"
EXAMPLE = "Write model.period='[{kind: window, span: 1024}, block]'."


def problems(*overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as error:
        load("debug", overrides)
    return error.value.problems


@pytest.mark.parametrize(
    ("period", "problem"),
    [
        ("[{kind: windo, span: 8}]", "[0]: expected block or window, got 'windo'. Did you mean 'window'?"),
        ("[block, blok]", "[1]: expected block or window, got 'blok'. Did you mean 'block'?"),
        ("[block, {span: 8}]", f"[1]: of no kind.{' ' + EXAMPLE}"),
        ("[{kind: window}]", f"[0].span: missing. {EXAMPLE}"),
        ("[{kind: window, span: 0}]", "[0].span: must be at least 1, got 0."),
        ("[{kind: block, hedas: 2}]", "[0].hedas: unknown key. Did you mean 'heads'?"),
        ("[3]", "[0]: expected a mapping of keys, got 3."),
        ("[]", ": expected at least one kind of layer, got []."),
        ("[{kind: block, rope_scaling: {factor: 2}}]", f"[0].rope_scaling: of no kind. {EXAMPLE}"),
        ("[{kind: block, rope_scaling: {kind: linear}}]", f"[0].rope_scaling.factor: missing. {EXAMPLE}"),
        ("window", f": expected a list, got 'window'. {EXAMPLE}"),
    ],
)
def test_a_kind_that_cannot_be_is_told_where_it_is(period, problem):
    assert problems(f"model.period={period}") == (f"command line: model.period{problem}",)


def test_a_scaling_of_no_kind_is_told_with_an_example():
    what, example = "of no kind", "Write model.rope_scaling='{kind: yarn, factor: 4.0, original_context: 4096}'."
    assert problems("model.rope_scaling={factor: 2}") == (f"command line: model.rope_scaling: {what}. {example}",)
    ramp = "{kind: yarn, factor: 2, original_context: 64, beta_fast: 0.5}"
    assert (
        "model.rope_scaling: expected beta_fast to be at least beta_slow" in problems(f"model.rope_scaling={ramp}")[0]
    )


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["model.period=[block, {kind: block, heads: 3}]"],
            "is not divisible by model.period[1].heads=3",
        ),
        (
            [
                "model.heads=12",
                "model.width=48",
                "model.period=[block, {kind: block, kv_heads: 3}]",
                "parallel.model=2",
            ],
            "model.period[1].kv_heads=3 neither divides parallel.model=2 nor is divisible by it",
        ),
        (
            ["model.period=[{kind: block, mlp: {kind: moe, experts: 4}}, block]", "parallel.expert=3"],
            "model.period[0].mlp.experts=4 is not divisible by parallel.expert=3",
        ),
        (
            ["model.period=[{kind: block, mlp: {kind: moe, experts: 4}}, {kind: block, mlp: {kind: moe, experts: 8}}]"],
            "model.period has kinds with 4 and 8 experts: metrics have one table for all. Use the same number.",
        ),
        (
            [f"model.period=[{WINDOW}, block]", "model.layers=6", "parallel.pipe=2"],
            "model.layers=6 is not divisible by parallel.pipe=2 x the 2 layers of model.period: stages are alike. "
            "Use parallel.pipe=1 or 3, or model.layers=4 or 8.",
        ),
        ([f"model.period=[{WINDOW}, block]", "model.share_layers=true"], "model.share_layers=true with several kinds"),
        (["model.period=[{kind: block, rope_theta: 5.0}]"], "rope_theta in model.period has no effect"),
        (
            ["model.period=[{kind: block, rope_scaling: {kind: linear, factor: 2}}]"],
            "rope_scaling in model.period has no effect",
        ),
        (
            ["model.positions=rotary", f"model.period=[{{kind: block, heads: 32, rope_scaling: {DYNAMIC}}}]"],
            "with model.period[0].rope_scaling=dynamic, which needs at least 4",
        ),
        ([f"model.period=[{WINDOW}, block]", "remat.policy=block"], "remat.policy=block with several kinds"),
        (
            ["model.kind=bert", "objective.kind=masked_lm", f"model.period=[{WINDOW}, block]", "model.attention=cudnn"],
            "span=8 of model.period: cuDNN's windows are causal",
        ),
    ],
)
def test_what_a_kind_cannot_be_combined_with_is_refused(overrides, problem):
    assert any(problem in each for each in problems(*overrides)), problems(*overrides)


def test_a_period_is_written_as_it_is_read():
    period = [{"kind": "window", "span": 8, "heads": 2}, "block"]
    config = make_config(model={"period": period})
    assert config.model_dump()["model"]["period"] == config.model_dump(mode="json")["model"]["period"] == period
    assert make_config(model=config.model.model_dump()).model == config.model


def test_keys_of_a_kind_replace_the_model_s():
    model = make_config(
        model={"layers": 5, "period": [{"kind": "window", "span": 4, "heads": 2}, "block"], "kv_heads": 2}
    ).model
    window, block = model.of_each_kind
    assert (window.heads, window.span, window.kv_width) == (2, 4, 32) and (block.heads, block.span) == (8, None)
    assert [model.layers_like(place) for place in (0, 1)] == [3, 2]


def test_each_kind_has_its_own_rotary_positions():
    scaling = {"kind": "linear", "factor": 8.0}
    period = [{"kind": "window", "span": 4, "rope_theta": 100.0}, {"kind": "block", "rope_scaling": scaling}]
    sizes = {"positions": "rotary", "rope_fraction": 0.5, "period": period}
    config = make_config(model=sizes)
    context = config.model.context
    assert config.model_dump()["model"]["period"] == period
    assert [make_rotary(model) for model in config.model.of_each_kind] == [
        Rotary(100.0, 0.5, None, context),
        Rotary(10_000.0, 0.5, LinearRope(**scaling), context),
    ]


def test_each_kind_has_its_own_kernel():
    """cuDNN takes the layers of a BERT that see whole rows, not those with windows."""
    sizes = {"kind": "bert", "attention_dropout": 0.0, "width": 64, "period": [{"kind": "window", "span": 4}, "block"]}
    config = make_config(model=sizes, objective={"kind": "masked_lm"}, precision=FLOAT32 | {"compute": "bfloat16"})
    assert [choose_kernel(each, "gpu").kernel for each in config.of_each_kind] == ["chunked", "cudnn"]
