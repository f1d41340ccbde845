"""ZeRO++ (arXiv:2306.10209): weights and gradients in few bits, and gathers within a host."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_lm.analysis import topology
from spmd_lm.config.schema import RunConfig
from spmd_lm.cost_model.expected_collectives import expected_collectives
from spmd_lm.parallel.codecs import Codec
from spmd_lm.parallel.trees import leaves_by_path
from spmd_lm.planning.audit import audit, render
from spmd_lm.resolve import abstract_plan
from spmd_lm.step.program import Program
from spmd_lm.training.replicas import ReplicaCheck
from tests.helpers import (
    FLOAT32,
    assert_equal,
    assert_states_close,
    canonical,
    degrees,
    device_batch,
    make_config,
    program,
    train_steps,
    trained,
)

pytestmark = pytest.mark.usefixtures("x64")
slow = pytest.mark.slow
MODEL = {"layers": 4, "width": 24, "dropout": 0.2}  # no power of two: 8 shards of 3 rows, and odd numbers of codes
LAYOUTS = {
    "data": {"data": 8},
    "padded": {"data": 5},
    "hybrid": {"replica": 2, "data": 2},
    "microbatches": {"data": 4, "microbatches": 2},
    "prefetch": {"data": 4, "prefetch": "on"},
    "once": {"data": 4, "reduce_once": True},
    "1f1b": {"data": 2, "pipe": 2, "microbatches": 2},
    "breadth-first": {"data": 2, "pipe": 2, "microbatches": 4, "schedule": "breadth_first", "chunks": 2},
    "breadth-first, ahead": {"data": 2, "pipe": 2, "microbatches": 4, "schedule": "breadth_first", "chunks": 2}
    | {"prefetch": "on"},
}
TENSOR = {
    "tensor": {"data": 4, "model": 2},
    "sequence": {"data": 2, "model": 2, "sequence": True, "replica": 2},
    "1f1b": {"data": 2, "pipe": 2, "model": 2, "microbatches": 2, "sequence": True},
}


def run(parallel: dict, **sections: dict) -> RunConfig:
    """A run under ZeRO-3.  A batch of 40 has a row for each of 5 and 8 devices and 4 microbatches of 2."""
    model, train = MODEL | sections.pop("model", {}), {"batch": 40} | sections.pop("train", {})
    return make_config(model=model, parallel={"zero": 3} | parallel, train=train, **sections)


def int8(parallel: dict, **sections: dict) -> RunConfig:
    return run({"quantize_gather": "int8"} | parallel, **sections)


@slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_whose_devices_hold_whole_rows_round_weights_alike(name):
    got, want = trained(int8(LAYOUTS[name])), trained(int8({"data": 2}))
    assert got.losses == pytest.approx(want.losses, rel=1e-12)
    assert_states_close(got.last, want.last, 1e-11)


@slow
@pytest.mark.parametrize("name", TENSOR)
def test_layouts_of_the_same_columns_round_weights_alike(name):
    """`model` divides columns, and so blocks."""
    got, want = trained(int8(TENSOR[name])), trained(int8({"data": 2, "model": 2}))
    assert got.losses == pytest.approx(want.losses, rel=1e-12)
    assert_states_close(got.last, want.last, 1e-11)


ADAPTERS = {
    "frozen": {"optim": {"freeze": "embedding.* blocks.0.* *.query"}},
    "int8 base": {"adapter": {"kind": "lora", "base": "int8"}},
    "nf4 base": {"adapter": {"kind": "lora", "base": "nf4"}, "model": {"width": 64, "mlp_width": 128}},
}


@slow
@pytest.mark.parametrize("name", ADAPTERS)
def test_frozen_matrices_are_rounded_and_coded_ones_sent_as_they_are(name):
    configs = [int8({"data": degree}, **ADAPTERS[name]) for degree in (2, 4)]
    got, want = map(trained, configs)
    assert got.losses == pytest.approx(want.losses, rel=1e-12)
    assert_states_close(got.last, want.last, 1e-11)
    plan = program(configs[0]).plan
    for each in plan.parameters:
        if plan.zero_axes(each.sharded_names):
            dtypes = plan.gathered_arrays(each, "float64").keys()
            assert dtypes == ({each.dtype} if each.coded else {"int8", "bfloat16"})
    sent = audit(configs[1], topology.parse_topology("cpu:4"))
    assert sent["missing_bytes"] + sent["excess_bytes"] <= 2048, render(sent)


@slow
def test_weights_are_rounded_and_only_as_much():
    rounded, exact = trained(int8(LAYOUTS["padded"])), trained(run({"data": 2}))
    difference = np.abs(rounded.losses / exact.losses - 1)
    assert (difference > 1e-9).all() and (difference < 1e-3).all()


@slow
def test_the_first_step_reads_decoded_weights_and_their_exact_gradients_move_the_exact_ones():
    """One step from weights that codes hold exactly is the exact step."""
    p, exact = program(int8({"data": 4})), program(run({"data": 4}))
    state, batch = p.init(), device_batch(p, 0)

    def rounded(x, names):
        matrix = "zero_width" in names
        if not matrix:
            return x
        dim = names.index("zero_width")
        moved = jnp.moveaxis(x, dim, 0)
        return jnp.moveaxis(Codec().decode(Codec().encode(moved), moved.shape[-1], x.dtype), 0, dim)

    params = jax.tree.map(rounded, jax.tree.map(np.asarray, state.params), p.plan.sharded_names)
    params = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), params, state.params)
    states = [dataclasses.replace(each.init(), params=jax.tree.map(jnp.copy, params)) for each in (p, exact)]
    (got, figures), (want, expected) = (each.step(state, batch) for each, state in zip((p, exact), states, strict=True))
    assert float(figures["loss"]) == float(expected["loss"]) and figures["grad_norm"] == expected["grad_norm"]
    assert_equal(jax.tree.map(np.asarray, got), jax.tree.map(np.asarray, want))
    ReplicaCheck(p).check(got, 1)


AUDITED = {
    "flat": {"data": 8},
    "tensor": {"replica": 2, "data": 2, "model": 2, "sequence": True, "microbatches": 2, "prefetch": "on"},
    "1f1b": {"data": 2, "pipe": 2, "model": 2, "microbatches": 2},
    "breadth-first": LAYOUTS["breadth-first, ahead"] | {"model": 2},
}


@pytest.mark.parametrize("name", [each if each == "flat" else pytest.param(each, marks=slow) for each in AUDITED])
def test_codes_and_scales_are_sent_and_nothing_else(name):
    """Scales are bfloat16, which a CPU sends in float32."""
    result = audit(int8(AUDITED[name], precision=FLOAT32), topology.parse_topology("cpu:8"))
    assert result["missing_bytes"] + result["excess_bytes"] <= 2048, render(result)
    dtypes = {row["dtype"] for row in result["collectives"] if row["part"] == "weights"}
    assert dtypes == {"s8", "f32"}


def within_host(parallel: dict, **sections: dict) -> RunConfig:
    return run({"secondary": "within_host"} | parallel, **sections)


def without_copy(config: RunConfig) -> Program:
    """ZeRO-3 on the rings of a run with a secondary copy."""
    p = Program(config, jax.devices()[: degrees(config).devices])
    assert p.plan.rings and p.plan.secondary
    p.plan = dataclasses.replace(p.plan, secondary=False)
    return p


RINGS = {
    "data": {"data": 8},
    "padded": {"data": 6},
    "hybrid": {"replica": 2, "data": 4},
    "tensor": {"data": 4, "model": 2, "sequence": True, "microbatches": 2},
    "prefetch": {"data": 8, "prefetch": "on"},
    "1f1b": {"data": 4, "pipe": 2, "microbatches": 2},
    "breadth-first": LAYOUTS["breadth-first"] | {"data": 4},
    "breadth-first, ahead": LAYOUTS["breadth-first, ahead"] | {"data": 4},
}


@slow
@pytest.mark.parametrize("codes", ["none", "int8"])
@pytest.mark.parametrize("name", RINGS)
def test_a_secondary_copy_changes_no_bit(name, codes):
    """Of ZeRO-3 on the same two rings; to rounding of one flat ring."""
    config = within_host(RINGS[name] | {"quantize_gather": codes}, train={"batch": 48})
    got, want = trained(config), train_steps(without_copy(config))
    np.testing.assert_array_equal(got.losses, want.losses)
    assert_equal(got.last, want.last)
    flat = trained(run(RINGS[name] | {"quantize_gather": codes}, train={"batch": 48}))
    assert got.losses == pytest.approx(flat.losses, rel=1e-12)
    assert_states_close(got.last, flat.last, 1e-11)


@slow
def test_a_secondary_copy_is_of_the_committed_state():
    """From the first step on, after a skipped one and after a resume, with frozen leaves."""
    config = within_host({"data": 4}, optim={"freeze": "embedding.* *.query"}, train={"guard": {"exclude": [2]}})

    def states(p: Program) -> list:
        state, found = p.init(), []
        for step in range(4):
            if step == 3:
                state = p.from_canonical(jax.tree.map(jnp.copy, p.canonical(state)))
            state, figures = p.step(state, device_batch(p, step))
            assert (int(figures["skip_reason"]) > 0) == (step == 1)
            found.append(jax.tree.map(np.asarray, (state.params, figures["loss"])))
        ReplicaCheck(p).check(state, 4)
        return found

    assert_equal(states(Program(config, jax.devices()[:4])), states(without_copy(config)))


@slow
@pytest.mark.parametrize("name", RINGS)
def test_layers_cross_hosts_once_per_step(name):
    config = within_host(RINGS[name], precision=FLOAT32, train={"batch": 48})
    result = audit(config, topology.parse_topology(f"cpu:{degrees(config).devices}"))
    assert result["missing_bytes"] + result["excess_bytes"] <= 2048, render(result)
    matrices = [each for each in program(config).plan.parameters if "zero_width" in each.sharded_names]
    whole, rings = sum(each.gathered_elements for each in matrices) * 4, program(config).plan.rings
    across = sum(
        row["bytes"] for row in result["collectives"] if (row["kind"], row["axes"]) == ("all-gather", ["data0"])
    )
    assert across == pytest.approx(whole / rings.within * (1 - 1 / rings.hosts))


def coded(codes: str, parallel: dict, **sections: dict) -> RunConfig:
    return run({"quantize_scatter": codes} | parallel, **sections)


def gradients(config: RunConfig) -> dict[str, np.ndarray]:
    """Those of the first step, before clipping: Adam's first moments."""
    p = Program(config, jax.devices()[: degrees(config).devices])
    state, _ = p.step(p.init(), device_batch(p, 0))
    return leaves_by_path(canonical(p, state).opt_state.mu)


ERRORS = {"int8": (1e-4, 0.03), "int4": (1e-2, 0.6)}


@slow
@pytest.mark.parametrize("codes", ERRORS)
@pytest.mark.parametrize("name", RINGS)
def test_gradients_of_matrices_are_rounded_and_those_of_vectors_exact(name, codes):
    sections = {"train": {"batch": 48}, "optim": {"clip": 0.0}}
    got, want = gradients(coded(codes, RINGS[name], **sections)), gradients(run(RINGS[name], **sections))
    least, most = ERRORS[codes]
    for path, g in want.items():
        error = np.linalg.norm(got[path] - g) / np.linalg.norm(g)
        if path.endswith("bias") or "norm" in path:
            assert np.abs(got[path] - g).max() <= 1e-11 * np.abs(g).max() + 1e-18, path
        else:
            assert least < error < most, (path, error)


@pytest.mark.parametrize("codes", [each if each == "int8" else pytest.param(each, marks=slow) for each in ERRORS])
@pytest.mark.parametrize("name", [each if each == "padded" else pytest.param(each, marks=slow) for each in RINGS])
def test_codes_of_gradients_are_sent_as_theory_expects(name, codes):
    config = coded(codes, RINGS[name], precision=FLOAT32, train={"batch": 48})
    result = audit(config, topology.parse_topology(f"cpu:{degrees(config).devices}"))
    assert result["missing_bytes"] + result["excess_bytes"] <= 2048, render(result)
    sent = [row for row in result["collectives"] if row["kind"] in ("all-to-all", "reduce-scatter")]
    over_data = [row for row in sent if row["axes"] in (["data0"], ["data1"])]
    assert {row["kind"] for row in over_data} == {"all-to-all"}
    assert {row["dtype"] for row in over_data} == {"s8" if codes == "int8" else "u8", "f32"}


@slow
@pytest.mark.parametrize("name", ["copies", "padded", "tensor", "1f1b"])
def test_the_three_together_leave_replicas_equal_and_draw_the_same_again(name):
    """A skipped step changes nothing, and a resumed run continues as if it had not ended.  Without sequence parallelism
    devices along `model` have copies of what it does not divide."""
    keys = {"quantize_gather": "int8", "secondary": "within_host", "quantize_scatter": "int4"}
    layout = RINGS | {"copies": {"data": 4, "model": 2}}
    config = run(layout[name] | keys, train={"batch": 48, "guard": {"exclude": [2]}}, precision=FLOAT32)
    p = Program(config, jax.devices()[: degrees(config).devices])
    state, losses, saved = p.init(), [], None
    for step in range(4):
        if step == 2:
            saved = jax.tree.map(np.asarray, p.canonical(state))
        state, figures = p.step(state, device_batch(p, step))
        losses.append(float(figures["loss"]))
    ReplicaCheck(p).check(state, 4)
    shardings = jax.tree.map(lambda x: x.sharding, p.abstract_canonical())
    resumed = p.from_canonical(jax.device_put(saved, shardings))
    for step in (2, 3):
        resumed, figures = p.step(resumed, device_batch(p, step))
    assert float(figures["loss"]) == losses[3]
    assert_equal(jax.tree.map(np.asarray, resumed), jax.tree.map(np.asarray, state))


def test_across_hosts_layers_send_a_quarter():
    """Of ZeRO-3 with gradients in bfloat16, on two hosts of H100s."""
    keys = {"quantize_gather": "int8", "secondary": "within_host", "quantize_scatter": "int4"}
    model = {"width": 1024, "heads": 8, "vocab": 1024}

    def across(layers: int, more: dict) -> float:
        precision = {"params": "float32", "compute": "bfloat16", "reduce": "bfloat16"}
        sections = {"precision": precision, "train": {"batch": 48}, "model": model | {"layers": layers}}
        config = run({"data": 16} | more, **sections)
        plan = abstract_plan(config, 16, "gpu", "NVIDIA H100 80GB HBM3")
        rows = expected_collectives(config, plan)
        return sum(row.bytes for row in rows if row.axes == ("data0",) and row.part in ("weights", "gradients"))

    few, three = (across(6, each) - across(4, each) for each in (keys, {"secondary": "within_host"}))
    matrices = 2 * 12 * 1024**2  # of two layers
    assert three == pytest.approx(2 * 2 * matrices / 8 / 2)  # weights once and gradients once
    assert few / (three * 3 / 2) < 0.254


FORMS = {
    "block": {"remat": {"policy": "block", "block_size": 2}},
    "full": {"remat": {"policy": "full"}},
    "unrolled": {"model": {"scan": False}, "remat": {"policy": "full"}},
    "shared": {"model": {"share_layers": True}},
    "once": {"parallel": {"reduce_once": True, "microbatches": 2}},
}


@slow
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_layers_rounds_gradients_at_random(form):
    """The key of the rounding crosses jax.checkpoint, loops and custom gradients."""
    sections = {"train": {"batch": 48}, "optim": {"clip": 0.0}} | FORMS[form]
    parallel = {"data": 4, "quantize_gather": "int8"} | sections.pop("parallel", {})
    got, want = gradients(coded("int4", parallel, **sections)), gradients(run(parallel, **sections))
    matrices = [path for path in want if not (path.endswith("bias") or "norm" in path)]
    errors = [np.linalg.norm(got[path] - want[path]) / np.linalg.norm(want[path]) for path in matrices]
    assert min(errors) > 0.01 and max(errors) < 0.6


@slow
@pytest.mark.parametrize("name", ["padded", "1f1b"])
def test_evaluation_and_logits_are_of_the_same_weights(name):
    p = program(within_host(RINGS[name] | {"quantize_gather": "int8"}, train={"batch": 48}))
    other = without_copy(p.config)
    params, batch = p.init().params, device_batch(p, 0)
    assert_equal(p.evaluate(params, batch), other.evaluate(params, batch))
    assert_equal(p.forward(params, batch), other.forward(params, batch))
