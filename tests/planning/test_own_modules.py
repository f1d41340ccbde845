"""Planning and auditing of blocks of one's own."""

import dataclasses
import json

import pytest

from spmd_lm.analysis import topology
from spmd_lm.config.load import load
from spmd_lm.cost_model import flops, memory
from spmd_lm.cost_model.expected_collectives import expected_collectives
from spmd_lm.cost_model.step_time import predict_step
from spmd_lm.planning import audit as auditing
from spmd_lm.planning.audit import audit, render
from spmd_lm.planning.plan_report import plan_on
from spmd_lm.planning.search import make_target, make_targets, search
from spmd_lm.step import own_check
from tests.own import write_example, write_module
from tests.planning.test_audit import compilable

TWICE = """
from flax import nnx
from spmd_lm.models.layers import Norm
from spmd_lm.models.mlp import MLP
from spmd_lm.models.transformer import Attention
from spmd_lm.ops.collectives import residual_stream


class Twice(nnx.Module):
    '''Attention and MLP side by side, each of which gathers their input.'''

    def __init__(self, init):
        self.norm, self.attention, self.mlp = Norm(init), Attention(init, 0.01), MLP(init, 0.01)

    def __call__(self, x, context):
        x = residual_stream(x)
        h = self.norm(x)
        return residual_stream(x + self.attention(h, context) + self.mlp(h, context)), {}
"""

LIKE_OURS = """
from spmd_lm.models.transformer import Block


class LikeOurs(Block):
    pass
"""


@pytest.fixture
def gptj(tmp_path):
    return write_example(tmp_path, "GPTJBlock")


def run(module, *overrides):
    sizes = ("model.dropout=0.0", "model.attention_dropout=0.0", "model.positions=rotary")
    return load("configs/debug.yaml", [f"model.module={module}", *sizes, *overrides])


SEQUENCE = ("parallel.model=2", "parallel.sequence=true", "parallel.zero=3")


def per_layer(report):
    return {row["kind"]: (row["code"], row["compiled"]) for row in report["per_layer"]}


@pytest.mark.parametrize(
    "name",
    ["cpu:8", pytest.param("v5p:2x2x2", marks=pytest.mark.slow), pytest.param("h100:1x8", marks=pytest.mark.slow)],
)
@pytest.mark.slow
def test_zero_and_gradients_are_those_of_theory_and_a_layer_s_collectives_are_shown(gptj, tmp_path, monkeypatch, name):
    where = compilable(name)
    monkeypatch.setattr(own_check, "MOST_PARAMETERS", 0)
    report = audit(run(gptj, *SEQUENCE, f"run.simulate_devices={where.simulated}"), where)
    assert report["ok"] and report["not_judged"] == ["blocks"] and not report["differences"]
    assert "your modules over 2 devices of `model` are not compared" in report["notice"]
    assert {row["part"] for row in report["theory"]} >= {"weights", "gradients", "scalars"}
    twice = audit(
        run(write_module(tmp_path, "Twice", TWICE), *SEQUENCE, f"run.simulate_devices={where.simulated}"), where
    )
    once, both = per_layer(report), per_layer(twice)
    assert once["all-gather"][0] == 2 and once["reduce-scatter"][0] == 2
    assert both["all-gather"][0] == 6 and both["reduce-scatter"][0] == 4
    if name == "cpu:8":
        assert all(code == compiled for code, compiled in [*once.values(), *both.values()])
    if name == "v5p:2x2x2":  # a GPU's compiler merges them
        assert both["all-gather"][1] > once["all-gather"][1]
    text = render(twice)
    assert "a layer of your block" in text and text.endswith(
        "matches theory, apart from your modules, which it does not judge"
    )


@pytest.mark.slow
def test_gradients_that_are_sent_twice_are_found_under_a_block_of_ones_own(gptj, monkeypatch):
    """Parts that theory judges are judged."""

    def doubled(*arguments):
        found = expected_collectives(*arguments)
        return [dataclasses.replace(row, bytes=row.bytes * 2) if row.part == "gradients" else row for row in found]

    monkeypatch.setattr(auditing, "expected_collectives", doubled)
    report = audit(run(gptj, *SEQUENCE, "run.simulate_devices=8"))
    assert not report["ok"] and report["missing_bytes"] > 0


@pytest.mark.parametrize("overrides", [SEQUENCE, ("parallel.model=4",), ("parallel.pipe=2", "parallel.microbatches=4")])
def test_our_block_as_one_s_own_costs_as_much(tmp_path, overrides):
    own, ours = (
        load("configs/debug.yaml", [*overrides, *each, "model.dropout=0.0", "model.attention_dropout=0.0"])
        for each in ([f"model.module={write_module(tmp_path, 'LikeOurs', LIKE_OURS)}"], [])
    )
    target = make_target(topology.parse_topology("h100:1x8"))

    def costs(config):
        plan = plan_on(config, target.topology)
        blocks = [row for row in expected_collectives(config, plan) if row.part == "blocks"]
        sent = {(row.kind, row.axes): row.bytes for row in blocks}
        step = predict_step(config, plan, target.hardware, target.software)
        return flops.train_step(config, plan), memory.table(config, plan), step.compute, sent

    assert costs(own) == costs(ours)


@pytest.mark.slow
def test_layouts_are_searched_with_what_the_block_costs(gptj):
    """It sends half of what ours does over `model`."""
    targets = make_targets([topology.parse_topology("h100:1x8")], None)

    def found(*overrides):
        layouts = search(run(gptj, "train.batch=8", "remat.policy=none", *overrides), targets).layouts
        return {json.dumps(each.overrides): each for each in layouts}

    own, ours = found(), found("model.module=null")
    assert own.keys() == ours.keys() and all(each.seconds > 0 and each.memory > 0 for each in own.values())
    tensor = [key for key in own if '"model": 8' in key and '"zero": 0' in key]
    assert tensor and all(0.4 < own[key].bytes / ours[key].bytes < 0.6 for key in tensor)
