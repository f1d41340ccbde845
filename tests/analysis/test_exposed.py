"""Schedules written by hand, on devices that make their times easy: 1 FLOP and 1 byte per second, and free memory.

GATHER sends 12 bytes along `data`, and a product of 5 columns takes 10 seconds."""

import math

import numpy as np
import pytest

from spmd_lm.analysis.exposed import Speeds, walk_schedule
from spmd_lm.analysis.hlo import HloModule
from spmd_lm.analysis.memory_traffic import KernelSpeeds

SIZES = {"data": 2, "model": 2}
SPEEDS = Speeds(KernelSpeeds(1.0, math.inf), SIZES, bandwidth=lambda kind, axes: 1.0, is_ring=lambda axes: False)
DATA, MODEL = "replica_groups={{0,2},{1,3}}, dimensions={0}", "replica_groups={{0,1},{2,3}}, dimensions={0}"
INPUTS = """  %a = f32[3]{0} parameter(0)
  %x = f32[1,1]{1,0} parameter(1)
  %y = f32[1,5]{1,0} parameter(2)
"""
PRODUCT = "dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}"


def computation(name: str, *lines: str, thread: str = "") -> str:
    *body, last = (f"%{line}" for line in lines)
    text = "".join(f"  {line}\n" for line in body)
    return f"{name} (a: f32[3], x: f32[1,1], y: f32[1,5]) -> f32[6] {{\n{INPUTS}{text}  ROOT {last}\n}}{thread}\n\n"


def walked(*entry: str, more: str = "", shares: dict | None = None) -> dict:
    text = f"HloModule step, is_scheduled=true\n\n{more}{computation('ENTRY %main', *entry)}"
    return walk_schedule(HloModule(text), SPEEDS, shares)


def times(result: dict) -> tuple[float, float, float]:
    """(seconds on wires, exposed, of the step)."""
    return result["wire_seconds"], result["exposed_seconds"], result["step_seconds"]


def test_a_synchronous_collective_is_exposed():
    result = walked(f"g = f32[6]{{0}} all-gather(%a), {DATA}", f"d = f32[1,5]{{1,0}} {PRODUCT}")
    assert times(result) == (12, 12, 22) and result["compute_seconds"] == 10 and result["exposed_fraction"] == 1
    row = {"kind": "all-gather", "axes": ["data"], "bytes": 12, "wire_seconds": 12, "exposed_seconds": 12}
    assert result["rows"] == [row]


START = f"s = (f32[3]{{0}}, f32[6]{{0}}) all-gather-start(%a), {DATA}"
DONE = "g = f32[6]{0} all-gather-done(%s)"


@pytest.mark.parametrize(("products", "waited"), [(0, 12), (1, 2), (2, 0)])
def test_an_asynchronous_pair_hides_behind_what_runs_in_between(products, waited):
    between = [f"d{n} = f32[1,5]{{1,0}} {PRODUCT}" for n in range(products)]
    result = walked(START, *between, DONE)
    assert times(result) == (12, waited, 10 * products + waited)
    assert result["exposed_fraction"] == pytest.approx(waited / 12)


def test_a_gpu_s_pair_that_is_synchronous_hides_nothing():
    sync = START + ', backend_config={"collective_backend_config":{"is_sync":true,"backend":"DEFAULT"}}'
    assert times(walked(sync, f"d = f32[1,5]{{1,0}} {PRODUCT}", DONE)) == (12, 12, 22)
    assert times(walked(sync.replace("true", "false"), f"d = f32[1,5]{{1,0}} {PRODUCT}", DONE)) == (12, 2, 12)


def test_a_call_of_the_sparse_core_is_asynchronous():
    called = computation("%called", f"c = f32[6]{{0}} all-gather(%a), {DATA}", thread=', execution_thread="sparsecore"')
    start = 's = ((f32[3]{0}), f32[6]{0}) call-start(%a), async_execution_thread="sparsecore", to_apply=%called'
    product, done = f"d = f32[1,5]{{1,0}} {PRODUCT}", "g = f32[6]{0} call-done(%s)"
    assert times(walked(start, product, done, more=called)) == (12, 2, 12)


def test_collectives_of_one_axis_queue_and_of_two_do_not():
    product = f"d = f32[1,5]{{1,0}} {PRODUCT}"
    first, second = DONE, "h = f32[6]{0} all-gather-done(%t)"
    other = START.replace("s =", "t =")
    assert times(walked(START, other, product, first, second)) == (24, 14, 24)
    assert times(walked(START, other.replace(DATA, MODEL), product, first, second)) == (24, 2, 12)


@pytest.mark.parametrize(("targets", "step"), [("1203", 24), ("3012", 12), ("1230", 24)])
def test_permutes_of_opposite_directions_share_no_wire_on_a_ring(targets, step):
    """Of 12 bytes each.  The second one's pairs: to these devices from 0, 1, 2 and 3."""

    def start(name: str, to: str) -> str:
        pairs = ",".join(f"{{{source},{target}}}" for source, target in enumerate(to))
        return f"{name} = (f32[3]{{0}}, f32[3]{{0}}) collective-permute-start(%a), source_target_pairs={{{pairs}}}"

    ends = [f"{to} = f32[3]{{0}} collective-permute-done(%{name})" for name, to in (("s", "g"), ("t", "h"))]
    entry = computation("ENTRY %main", start("s", "1230"), start("t", targets), *ends)
    speeds, module = SPEEDS._replace(sizes={"data": 4}), HloModule(f"HloModule step, is_scheduled=true\n\n{entry}")
    result = walk_schedule(module, speeds._replace(is_ring=lambda axes: True))
    assert (result["wire_seconds"], result["step_seconds"]) == (24, step)
    assert walk_schedule(module, speeds)["step_seconds"] == 24


def gather(name: str, chain: str = ', frontend_attributes={chain_id="0"}') -> str:
    return f"{name} = f32[6]{{0}} all-gather(%a), channel_id=1, {DATA}{chain}"


CHAIN = (
    computation("%begin", gather("g0"), 'c0 = f32[6]{0} custom-call(%g0), custom_call_target="AsyncCollectiveStart"')
    + computation("%middle", gather("g1"), f"d1 = f32[1,5]{{1,0}} {PRODUCT}", "t1 = (f32[6], f32[1,5]) tuple(%g1, %d1)")
    + computation("%end", gather("g2"), 'c2 = f32[6]{0} custom-call(%g2), custom_call_target="AsyncCollectiveDone"')
)


def fusion(name: str, called: str) -> str:
    return f"{name} = f32[6]{{0}} fusion(%a, %x, %y), kind=kCustom, calls=%{called}"


@pytest.mark.parametrize(("steps", "waited"), [(0, 12), (1, 2), (2, 0)])
def test_a_chain_of_fusions_hides_behind_their_products_alone(steps, waited):
    middle = [fusion(f"m{n}", "middle") for n in range(steps)]
    product = f"d = f32[1,5]{{1,0}} {PRODUCT}"  # beside which the chain does not go on
    result = walked(fusion("f", "begin"), *middle, product, fusion("e", "end"), more=CHAIN)
    assert times(result) == (12, waited, 10 * steps + 10 + waited)
    assert result["compute_seconds"] == 10 * steps + 10


def test_a_collective_fused_with_a_product_hides_behind_it():
    more = CHAIN.replace(', frontend_attributes={chain_id="0"}', "")
    assert times(walked(fusion("f", "middle"), more=more)) == (12, 2, 12)
    assert times(walked(fusion("f", "begin"), more=more)) == (12, 12, 12)  # its own memory traffic is no compute


def loop(turns: int, operand: str = "%a") -> str:
    known = f'backend_config={{"known_trip_count":{{"n":"{turns}"}}}}'
    return f"w = (f32[3], f32[6]) while({operand}), condition=%none, body=%body, {known}"


@pytest.mark.parametrize("turns", [0, 1, 2, 7])
def test_a_loop_repeats_its_turns(turns):
    body = computation("%body", f"g = f32[6]{{0}} all-gather(%a), {DATA}", f"d = f32[1,5]{{1,0}} {PRODUCT}")
    result = walked(loop(turns), more=body)
    assert times(result) == (12 * turns, 12 * turns, 22 * turns) and result["compute_seconds"] == 10 * turns


def test_what_a_loop_starts_may_end_in_its_next_turn():
    """The first one waits for the start before the loop, which nothing hides, and all others, the one after the loop
    included, for what a product leaves of one turn before."""
    body = computation(
        "%body",
        "state = (f32[3], (f32[3], f32[6])) parameter(3)",
        "before = (f32[3], f32[6]) get-tuple-element(%state), index=1",
        "h = f32[6]{0} all-gather-done(%before)",
        START.replace("s =", "next ="),
        f"d = f32[1,5]{{1,0}} {PRODUCT}",
        "carry = (f32[3], (f32[3], f32[6])) tuple(%a, %next)",
    )
    init = "init = (f32[3], (f32[3], f32[6])) tuple(%a, %s)"
    after = "last = (f32[3], f32[6]) get-tuple-element(%w), index=1"
    end = "g = f32[6]{0} all-gather-done(%last)"
    assert times(walked(START, init, loop(5, "%init"), after, end, more=body)) == (6 * 12, 12 + 5 * 2, 12 + 5 * 12)


def test_what_is_on_its_way_during_a_loop_hides_behind_all_of_it():
    body = computation("%body", f"d = f32[1,5]{{1,0}} {PRODUCT}")
    assert times(walked(START, loop(1), DONE, more=body)) == (12, 2, 12)
    assert times(walked(START, loop(9), DONE, more=body)) == (12, 0, 90)


CONDITIONAL = (
    'c = f32[6] conditional(%k, %a, %a), branch_computations={%no, %yes}, metadata={op_name="jit(step)/when_on/cond"}'
)
BRANCHES = computation(
    "%yes", f"g = f32[6]{{0}} all-gather(%a), {DATA}", f"d = f32[1,5]{{1,0}} {PRODUCT}"
) + computation("%no", f"e = f32[1,5]{{1,0}} {PRODUCT}")


def test_a_branch_counts_as_often_as_stages_take_it():
    result = walked(CONDITIONAL, more=BRANCHES, shares={"on": np.array([0.5, 1.0])})
    assert times(result) == (9, 9, 19) and result["compute_seconds"] == 10 and result["rows"][0]["bytes"] == 9
    assert times(walked(CONDITIONAL, more=BRANCHES, shares={"on": np.zeros(2)})) == (0, 0, 10)


def test_a_branch_within_one_counts_where_both_are_taken():
    """The stage that takes the outer one does not take the inner one."""
    outer = CONDITIONAL.replace("c =", "o =").replace("%no, %yes", "%never, %always").replace("when_on", "when_first")
    more = BRANCHES + computation("%always", CONDITIONAL) + computation("%never", "n = f32[3] copy(%a)")
    shares = {"first": np.array([1.0, 0.0]), "on": np.array([0.0, 1.0])}
    assert times(walked(outer, more=more, shares=shares)) == (0, 0, 5)


def test_without_shares_the_dearest_branch_counts():
    assert times(walked(CONDITIONAL, more=BRANCHES)) == (12, 12, 22)
    swapped = CONDITIONAL.replace("%no, %yes", "%yes, %no")
    assert times(walked(swapped, more=BRANCHES)) == (12, 12, 22)


def test_memory_bounds_what_products_do_not():
    slow = SPEEDS._replace(kernels=KernelSpeeds(1.0, 0.5))
    text = f"HloModule step\n\n{computation('ENTRY %main', f'd = f32[1,5]{{1,0}} {PRODUCT}')}"
    assert walk_schedule(HloModule(text), slow)["step_seconds"] == 4 * (1 + 5 + 5) / 0.5
