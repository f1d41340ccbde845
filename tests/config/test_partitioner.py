"""parallel.partitioner: auto goes by a table of compiled steps, and says what it went by."""

import pytest

from spmd_lm.config import partitioner
from spmd_lm.config.partitioner import choose_partitioner, table
from spmd_lm.planning.plan_report import describe, summary
from tests.helpers import FLOAT32, make_config

ROW = {"platform": "tpu", "zero": 1, "model": True, "sequence": False, "topology": "v5p:2x2x2"}
ROWS = (
    ROW | {"exposed": {"a": 0.9, "b": 1.01}, "memory": {"a": 1.0, "b": 0.98}},
    ROW | {"zero": 2, "exposed": {"a": 0.9, "b": 1.02}, "memory": {"a": 1.0, "b": 1.0}},
    ROW | {"zero": 3, "exposed": {"a": 0.5}, "memory": {"a": 1.011}},
)


@pytest.mark.parametrize(
    ("parallel", "platform", "overlaps", "chosen", "why"),
    [
        ({"partitioner": "types"}, "cpu", False, "types", "as configured"),
        ({"partitioner": "manual"}, "tpu", False, "manual", "as configured"),
        ({"model": 2, "zero": 1}, "tpu", False, "types", "exposed time 1.010 and memory 1.000"),
        ({"model": 2, "zero": 1}, "tpu", True, "manual", "in parts"),
        ({"model": 2, "zero": 1}, "gpu", False, "manual", "were not compared on gpu"),
        ({"model": 2, "zero": 1, "sequence": True}, "tpu", False, "manual", "were not compared"),
        ({"model": 2, "zero": 1, "pipe": 2}, "tpu", False, "manual", "stages of a pipeline"),
        ({"model": 2, "zero": 2}, "tpu", False, "manual", "exposed time 1.020"),  # of one of two versions of jax
        ({"model": 2, "zero": 3}, "tpu", False, "manual", "memory 1.011"),
    ],
)
def test_auto_takes_types_where_a_compiled_step_is_as_good(parallel, platform, overlaps, chosen, why, monkeypatch):
    monkeypatch.setattr(partitioner, "table", lambda: ROWS)
    choice = choose_partitioner(make_config(parallel=parallel), platform, overlaps)
    assert choice.partitioner == chosen and why in choice.why


def test_modules_of_ones_own_are_manual(monkeypatch):
    monkeypatch.setattr(partitioner, "table", lambda: ROWS)
    config = make_config(parallel={"model": 2, "zero": 1})
    assert choose_partitioner(config, "tpu", False).partitioner == "types"
    assert choose_partitioner(config, "tpu", False, own=True) == (
        "manual",
        "modules of one's own may do what types cannot describe",
    )


def test_experts_are_manual(monkeypatch):
    monkeypatch.setattr(partitioner, "table", lambda: ROWS)
    dense, experts = (
        make_config(model={"mlp": mlp}, parallel={"model": 2, "zero": 1})
        for mlp in ({"kind": "dense"}, {"kind": "moe", "experts": 4})
    )
    assert [choose_partitioner(each, "tpu", False).partitioner for each in (dense, experts)] == ["types", "manual"]


def test_the_table_has_one_row_for_each_layout():
    layouts = [tuple(row[key] for key in ("platform", "zero", "model", "sequence")) for row in table()]
    assert len(set(layouts)) == len(layouts)
    for row in table():
        assert row["exposed"].keys() == row["memory"].keys() != set()
        assert all(0 < share < 10 for figure in ("exposed", "memory") for share in row[figure].values())


def test_the_plan_says_who_inserts_the_collectives_and_why(monkeypatch):
    config = make_config(parallel={"data": 4, "model": 2, "zero": 1}, precision=FLOAT32)
    text = summary(describe(config))
    assert "sends   manual (types were not compared on cpu)" in text
