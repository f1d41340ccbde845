"""Predicted step times beside those that papers measured.  Rows to which a constant was fitted are not judged."""

import math
from pathlib import Path

import numpy as np
import pytest

from spmd_lm.cost_model.step_time import OURS

ROOT = Path(__file__).parents[2]

OUTLIERS = {
    # 88 TFLOP/s at 768 GPUs and 44 at 1536 are the same time of a step, as if twice as many hops cost nothing.
    ("PTD-P, table 2, ZeRO-3", "174.6B on 768"),
    # From 95% to 83% at 2 ways, where the same paper goes from 82% to 79% at 4 and from 77% to 74% at 8.
    ("Megatron-LM, table 1", "2.5B on 128"),
}


def rms(errors):
    return math.sqrt(sum(error**2 for error in errors) / len(errors))


def ranks(values):
    values = np.array(values)
    return [(values < value).sum() + ((values == value).sum() - 1) / 2 for value in values]


@pytest.fixture
def published_times(benchmark_script):
    return benchmark_script("published_times")


@pytest.fixture
def predictions(published_times):
    return {table["table"]: published_times.predict(table) for table in published_times.tables()}


def test_published_times_are_predicted(predictions):
    judged = {table: [row for row in rows if not row.fitted] for table, rows in predictions.items()}
    errors = {table: [row.error for row in rows] for table, rows in judged.items()}
    first = judged["PTD-P, table 1"]
    assert rms(errors["PTD-P, table 1"]) <= 0.05
    assert np.corrcoef(ranks([row.measured for row in first]), ranks([row.value for row in first]))[0, 1] >= 0.8
    assert rms(errors["PTD-P, table 2, ZeRO-3"]) <= 0.10
    assert rms(errors["Reducing Activation Recomputation, table 5"]) <= 0.05
    for row in (*judged["Megatron-LM, table 1"], *judged["Megatron-LM, table 8"]):  # efficiencies, in points
        devices = int(row.name.split()[-1]) if row.table.endswith("8") else 1
        if (row.table, row.name) not in OUTLIERS:
            assert abs(row.value - row.measured) / devices < 0.05, row
    far = {(row.table, row.name) for rows in judged.values() for row in rows if abs(math.expm1(row.error)) > 0.1}
    assert far == OUTLIERS and len(far) <= 0.2 * sum(map(len, judged.values()))


def test_hopper_is_predicted_better_than_by_a_constant(predictions):
    """Each row of the H100 table, with one factor fitted to the others."""
    rows = predictions["Megatron-Core"]

    def leaving_one_out(logs):
        return rms([each - (sum(logs) - each) / (len(logs) - 1) for each in logs])

    assert leaving_one_out([row.error for row in rows]) < 0.059 < leaving_one_out([math.log(r.measured) for r in rows])


def test_at_most_three_rows_a_kind_of_hardware_were_fitted_to(published_times):
    fitted = {}
    for table in published_times.tables():
        fitted.setdefault(table["hardware"], []).extend(row["name"] for row in table["rows"] if "fitted" in row)
    assert all(1 <= len(names) <= 3 for names in fitted.values()), fitted


def test_what_a_paper_does_not_say_is_the_fastest_that_fits(predictions):
    (row,) = [row for row in predictions["PTD-P, table 1"] if row.name == "1T"]
    assert row.chosen == "microbatch 1, chunks 2" and row.step.parts["bubble"] > 0


def test_the_range_of_a_predicted_step_is_that_of_published_runs(published_times, predictions):
    """Of tables in units of a rate: what a system's products reached, had the model been right about all else."""
    reached = [
        published_times.profiles()[table["system"]].software * row.measured / row.value
        for table in published_times.tables()
        if table["unit"] in ("tflops", "seconds")
        for row in predictions[table["table"]]
    ]
    most, least = OURS.shares
    assert 0 < most - max(reached) < 0.01 and 0 < min(reached) - least < 0.01


def test_pages_count_the_rows_that_are_reproduced(predictions):
    """As they stand in docs/cost-model.md, which `python benchmarks/published_times.py` makes."""
    rows = [row for rows in predictions.values() for row in rows]
    judged = [row for row in rows if not row.fitted]
    near = [row for row in judged if abs(math.expm1(row.error)) <= 0.1]
    told = f"reproduces {len(near)} of {len(judged)} published results"
    left_out = f"fitted to {len(rows) - len(judged)} others"
    for page in ("README.md", "docs/cost-model.md"):
        text = " ".join((ROOT / page).read_text().split())
        assert told in text and left_out in text, (page, told, left_out)
