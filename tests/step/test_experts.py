"""A mixture of experts is the same run under every layout, and what the reference computes token by token."""

import pytest

from tests.helpers import assert_states_close, make_config, trained, trained_reference

pytestmark = pytest.mark.usefixtures("x64")

MOE = {"kind": "moe", "experts": 4, "capacity": 1.0}
RUNS = {
    "one device, rows in two groups": ({"data": 1}, {"group": 8, "capacity": 0.5}),
    "data 2 x expert 2, a shared expert": (
        {"data": 2, "expert": 2, "zero": 1},
        {"shared": 24, "shared_gate": True, "renormalize": False, "per_token": 1, "capacity": 1.25},
    ),
    "expert 2 x model 2, sequence, ZeRO-3": (
        {"data": 1, "expert": 2, "model": 2, "sequence": True, "zero": 3, "microbatches": 2},
        {"capacity": "none"},
    ),
}
MORE = {
    "expert 4, unrolled": ({"data": 2, "expert": 4, "zero": 2}, {"per_token": 3}),
    "pipe 2 x expert 2, ZeRO-3": ({"pipe": 2, "data": 2, "expert": 2, "zero": 3, "microbatches": 2}, {}),
    "breadth first": (
        {"pipe": 2, "chunks": 2, "data": 1, "expert": 2, "zero": 3, "microbatches": 4, "schedule": "breadth_first"},
        {"shared": 24},
    ),
    "replica 2 x data 2 x expert 2": ({"replica": 2, "data": 2, "expert": 2, "zero": 3}, {}),
    "model 4": ({"data": 2, "model": 4, "zero": 1}, {"shared": 24, "shared_gate": True}),
    "prefetch": ({"data": 2, "expert": 2, "zero": 3, "prefetch": "on"}, {}),
}


def config_of(parallel: dict, moe: dict, **model):
    period = [{"kind": "block", "mlp": {"kind": "dense"}}, "block"] if parallel.get("pipe", 1) > 1 else None
    model = {"layers": 8 if parallel.get("chunks") else 4 if period else 2, "mlp": MOE | moe, "period": period} | model
    return make_config(model=model, parallel=parallel | {"partitioner": "manual"})


@pytest.mark.parametrize(
    ("parallel", "moe"),
    [*RUNS.values(), *(pytest.param(*run, marks=pytest.mark.slow) for run in MORE.values())],
    ids=[*RUNS, *MORE],
)
def test_a_layout_computes_the_reference(parallel, moe):
    form = {"scan": "expert" not in parallel or parallel["expert"] < 4}
    activation = {"activation": "swiglu"} if moe.get("shared_gate") else {}
    config = config_of(parallel, moe, **form, **activation)
    got, want = trained(config), trained_reference(config)
    assert got.losses == pytest.approx(want.losses, rel=1e-12)
    assert got.dropped.tolist() == want.dropped.tolist() and (sum(want.dropped) > 0) == (moe.get("capacity") != "none")
    assert got.norms == pytest.approx(want.norms, rel=1e-12)
    assert_states_close(got.last, want.last, 1e-11)
