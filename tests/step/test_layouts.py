"""Layouts and sizes drawn at random: whatever is legal computes the reference, in float64."""

import math

import hypothesis
import pytest
from hypothesis import strategies as st

from spmd_lm import resolve
from spmd_lm.axes import MESH_AXES
from spmd_lm.config.adapters import NoAdapter
from spmd_lm.config.checks import problems
from spmd_lm.config.layout_checks import check_devices
from spmd_lm.config.overlap import collective_matmul_obstacles
from spmd_lm.config.schema import Model, Parallel
from tests.helpers import assert_states_close, make_config, program, trained, trained_reference

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("x64")]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Cuts rows of a few tokens into several blocks."""
    monkeypatch.setattr(resolve, "attention_block", lambda platform: 4)


@st.composite
def runs(draw):
    """A model, and a layout of it on 2 to 8 devices; what cannot be is drawn again."""
    chance = st.booleans()
    heads, layers = draw(st.sampled_from([2, 4, 6])), draw(st.integers(1, 4))
    moe = {
        "kind": "moe",
        "experts": draw(st.sampled_from([4, 8])),
        "per_token": draw(st.integers(1, 3)),
        "capacity": draw(st.sampled_from(["none", 1.0, 0.5])),
        "group": draw(st.sampled_from([None, 3])),
        "renormalize": draw(chance),
        "shared": draw(st.sampled_from([None, heads * 2])),
    }
    dense = {"kind": "dense"}
    model = {
        "layers": layers,
        "heads": heads,
        "width": heads * draw(st.sampled_from([3, 5, 8])),
        "mlp_width": heads * draw(st.integers(2, 9)),
        "context": draw(st.sampled_from([6, 12, 15, 16])),
        "vocab": draw(st.integers(17, 70)),
        "dropout": draw(st.sampled_from([0.0, 0.2])),
        "attention": draw(st.sampled_from(["auto", "chunked"])),
        "attention_dropout": draw(st.sampled_from([0.0, 0.1])),
        "use_bias": draw(chance),
        "tie_embeddings": draw(chance),
        "scan": draw(chance),
        "mlp": draw(st.sampled_from([dense, moe, moe | {"shared_gate": moe["shared"] is not None}])),
        "period": draw(st.sampled_from([None, ["block", {"kind": "block", "mlp": moe}]])),
    }
    degree = st.sampled_from([1, 2, 3, 4])
    parallel = {
        "pipe": draw(st.sampled_from([1, 2])),
        "schedule": draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "breadth_first"])),
        "chunks": draw(st.sampled_from([1, 2])),
        "run_idle_stages": draw(chance),
        "replica": draw(st.sampled_from([1, 2])),
        "data": draw(degree),
        "expert": draw(st.sampled_from([1, 2, 4, 8])),
        "context": draw(st.sampled_from([1, 2, 4])),
        "context_attention": draw(st.sampled_from(["heads", "ring"])),
        "model": draw(degree),
        "microbatches": draw(st.sampled_from([1, 2, 4])),
        "zero": draw(st.integers(0, 3)),
        "sequence": draw(chance),
        "reduce_once": draw(chance),
        "prefetch": draw(st.sampled_from(["auto", "on"])),
        "partitioner": draw(st.sampled_from(["types", "manual"])),
    }
    devices = math.prod(parallel[axis] for axis in MESH_AXES)
    hypothesis.assume(2 <= devices <= 8)
    sized, laid_out = Model(**model), Parallel(**parallel)
    if not any(collective_matmul_obstacles(sized, laid_out, NoAdapter())):
        parallel["collective_matmul"] = draw(st.sampled_from(["on", "off"]))
    remat = {"policy": draw(st.sampled_from(["none", "selective", "residual", "full", "offload"]))}
    sections = {"model": model, "train": {"batch": 24}, "optim": {"clip": draw(st.sampled_from([0.0, 0.05]))}}
    config = make_config(parallel=parallel, remat=remat, **sections)
    hypothesis.assume(not problems({name: getattr(config, name) for name in type(config).model_fields}))
    hypothesis.assume(not check_devices(config, devices))
    return config, make_config(remat={"policy": "none"}, **sections)


@hypothesis.settings(max_examples=4, suppress_health_check=list(hypothesis.HealthCheck), deadline=None)
@hypothesis.given(runs())
def test_any_layout_computes_the_reference(drawn):
    config, alone = drawn
    got, want = trained(config), trained_reference(alone)
    for each in (program, trained, trained_reference):
        each.cache_clear()  # of what is not asked for again
    assert got.losses == pytest.approx(want.losses, rel=1e-12)
    assert got.dropped.tolist() == want.dropped.tolist()
    assert got.norms == pytest.approx(want.norms, rel=1e-12)
    assert_states_close(got.last, want.last, 1e-11)
