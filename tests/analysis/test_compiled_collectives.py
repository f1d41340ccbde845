"""HLO as compilers write it, shortened."""

import numpy as np
import pytest

from spmd_lm.analysis.compiled_collectives import collective_instructions, compiled_collectives
from spmd_lm.analysis.hlo import HloModule

TPU = """HloModule jit_step, is_scheduled=true

%all-reduce-scatter.1 (p: bf16[8,4]) -> bf16[4,4] {
  %p = bf16[8,4]{1,0} parameter(0)
  %ar = bf16[8,4]{1,0} all-reduce(%p), replica_groups={{0,1},{2,3}}, to_apply=%add
  ROOT %s = bf16[4,4]{1,0} dynamic-slice(%ar, %i, %z), dynamic_slice_sizes={4,4}
}

%body (t: (s32[], bf16[8,4])) -> (s32[], bf16[8,4]) {
  %x = bf16[8,4]{1,0:T(8,128)(2,1)} get-tuple-element(%t), index=1
  %f = bf16[4,4]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1, metadata={op_name="jit(f)/blocks/x"}
  %g = (bf16[4,4]{1,0}, bf16[8,4]{1,0}) all-gather-start(%f), replica_groups=[2,2]<=[4], dimensions={0}
  ROOT %d = bf16[8,4]{1,0} all-gather-done(%g)
}

%condition (t: (s32[], bf16[8,4])) -> pred[] {
  %n = s32[] constant(7)
  %i = s32[] get-tuple-element(%t), index=0
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (a: f32[4]) -> f32[4] {
  %a = f32[4]{0} parameter(0)
  %w = (s32[], bf16[8,4]) while(%t0), condition=%condition, body=%body
  %k = (s32[], bf16[8,4]) while(%t1), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %r = (f32[4]{0}, f32[]) all-reduce(%a, %b), replica_groups=[2,2]<=[2,2]T(1,0), to_apply=%add
  %b = f32[] constant(1)
  %m = f32[4]{0} collective-permute(%a), source_target_pairs={{0,2},{2,0}}
  ROOT %z = f32[4]{0} all-reduce(%a), replica_groups=mesh['data'=2,'model'=2] {'model'}, to_apply=%add
}
"""


@pytest.fixture(scope="module")
def collectives():
    return collective_instructions(HloModule(TPU), 4)


def test_a_loop_counts_once_per_iteration(collectives):
    scatters = [c for c in collectives if c.kind == "reduce-scatter"]
    assert [(c.count, c.full_bytes, c.result_bytes, c.lowered_as) for c in scatters] == [
        (7, 64, 32, "all-reduce-scatter fusion"),
        (3, 64, 32, "all-reduce-scatter fusion"),
    ]


def test_an_asynchronous_pair_is_one_collective(collectives):
    assert [(c.count, c.full_bytes, c.wire_bytes) for c in collectives if c.kind == "all-gather"] == [
        (7, 64, 32),
        (3, 64, 32),
    ]


def test_replica_groups_in_every_syntax(collectives):
    (tupled, meshed) = [c for c in collectives if c.kind == "all-reduce"]
    assert (tupled.num_arrays, tupled.full_bytes, tupled.groups) == (2, 20, ((0, 2), (1, 3)))
    assert meshed.groups == ((0, 1), (2, 3))
    assert {c.groups for c in collectives if c.kind == "all-gather"} == {((0, 1), (2, 3))}
    (permute,) = [c for c in collectives if c.kind == "collective-permute"]
    assert (permute.groups, permute.wire_bytes) == (((0, 2), (2, 0)), 16)


PIPELINE = """HloModule jit_step

%yes (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %c = f32[4]{0} conditional(%k, %p, %p), branch_computations={%inner_no, %inner_yes}
}

%no (p: f32[4]) -> f32[4] {
  ROOT %p = f32[4]{0} parameter(0)
}

%inner_yes (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %r = f32[4]{0} all-reduce(%p), replica_groups={{0,1},{2,3}}, metadata={op_name="when_on/cond/branch_1_fun/when_leaves/cond/branch_1_fun/psum"}
}

%inner_no (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %g = f32[8]{0} all-gather(%p), replica_groups={{0,1},{2,3}}, dimensions={0}
}

%body (t: (s32[], f32[4])) -> (s32[], f32[4]) {
  %x = f32[4]{0} get-tuple-element(%t), index=1
  %if = f32[4]{0} conditional(%on, %x, %x), true_computation=%yes, false_computation=%no, metadata={op_name="while/body/when_on/cond"}
  ROOT %m = f32[4]{0} collective-permute(%if), source_target_pairs={{0,2},{2,0}}
}

ENTRY %main (a: f32[4]) -> f32[4] {
  %a = f32[4]{0} parameter(0)
  ROOT %w = (s32[], f32[4]) while(%t0), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"10"}}
}
"""  # noqa: E501


def test_branches_count_as_often_as_they_run_on_each_stage():
    """Even where the compiler dropped the name of a condition."""
    shares = {"on": np.array([0.8, 0.5]), "leaves": np.array([0.0, 1.0])}
    by_kind = {c.kind: c for c in collective_instructions(HloModule(PIPELINE), 4, shares)}
    assert by_kind["all-reduce"].stage_counts == (0, 5)
    assert by_kind["all-gather"].stage_counts == (8, 0)
    assert by_kind["collective-permute"].stage_counts == (10, 10)
    assert [by_kind[kind].conditional for kind in ("all-reduce", "all-gather", "collective-permute")] == [
        True,
        True,
        False,
    ]
    assert by_kind["all-reduce"].count == 2.5


PEELED = """
HloModule step

%cond (t: (f32[4], s32[])) -> pred[] {
  %limit = s32[] constant(16)
  %t = (f32[4]{0}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%t), index=1
  ROOT %lt = pred[] compare(%i, %limit), direction=LT
}

%body (t: (f32[4], s32[])) -> (f32[4], s32[]) {
  %x = f32[4]{0} get-tuple-element(%t), index=0
  ROOT %g = f32[8]{0} all-gather(%x), replica_groups={{0,1}}, dimensions={0}
}

ENTRY %main (a: f32[4]) -> f32[4] {
  %a = f32[4]{0} parameter(0)
  %first = s32[] constant(1)
  %count = s32[] copy(%first)
  %carry = (f32[4]{0}, s32[]) tuple(%a, %count)
  ROOT %w = (f32[4]{0}, s32[]) while(%carry), condition=%cond, body=%body
}
"""


@pytest.mark.parametrize(("first", "count"), [("constant(1)", 15), ("constant(0)", 16), ("parameter(1)", 16)])
def test_a_loop_counts_from_where_it_begins(first, count):
    """A TPU's compiler runs the first layer apart if inputs of layers go to the host."""
    module = HloModule(PEELED.replace("constant(1)", first))
    assert [c.count for c in collective_instructions(module, 2)] == [count]


def test_without_shares_every_branch_counts_fully():
    assert {c.count for c in collective_instructions(HloModule(PIPELINE), 4)} == {10}


def test_a_permute_without_pairs_sends_nothing_and_yields_zeros():
    module = HloModule(PIPELINE.replace("source_target_pairs={{0,2},{2,0}}", "source_target_pairs={}"))
    (permute,) = [c for c in collective_instructions(module, 4) if c.kind == "collective-permute"]
    assert permute.yields_zeros and permute.wire_bytes == 0
    assert not any(c.yields_zeros for c in collective_instructions(HloModule(PIPELINE), 4))


CHAINS = """HloModule jit_step, is_scheduled=true

%fused_start (p: bf16[2,4]) -> (bf16[2,4], bf16[8,4], u32[]) {
  %p0 = bf16[2,4]{1,0} parameter(0)
  %g0 = bf16[8,4]{1,0} all-gather(%p0), channel_id=19, replica_groups=[1,4]<=[4], dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %s = (bf16[2,4]{1,0}, bf16[8,4]{1,0}, u32[]{:S(2)}) custom-call(%g0), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion (p: bf16[2,4], q: bf16[8,4]) -> (bf16[8,4], bf16[8,4]) {
  %p1 = bf16[2,4]{1,0} parameter(0)
  %q1 = bf16[8,4]{1,0} parameter(1)
  %dot = bf16[8,4]{1,0} convolution(%q1, %q1), dim_labels=bf_io->bf
  %g1 = bf16[8,4]{1,0} all-gather(%p1), channel_id=19, replica_groups=[1,4]<=[4], dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %t = (bf16[8,4]{1,0}, bf16[8,4]{1,0}) tuple(%dot, %g1)
}

%fused_done (p: bf16[2,4]) -> bf16[8,4] {
  %p2 = bf16[2,4]{1,0} parameter(0)
  %g2 = bf16[8,4]{1,0} all-gather(%p2), channel_id=19, replica_groups=[1,4]<=[4], dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %d = bf16[8,4]{1,0} custom-call(%p2, %g2), custom_call_target="AsyncCollectiveDone"
}

%body (t: (s32[], bf16[2,4])) -> (s32[], bf16[2,4]) {
  %x = bf16[2,4]{1,0} get-tuple-element(%t), index=1
  %f0 = (bf16[2,4]{1,0}, bf16[8,4]{1,0}, u32[]) fusion(%x), kind=kCustom, calls=%fused_start
  %f1 = (bf16[8,4]{1,0}, bf16[8,4]{1,0}) fusion(%x, %y), kind=kOutput, calls=%async_collective_fusion
  %f2 = (bf16[8,4]{1,0}, bf16[8,4]{1,0}) fusion(%x, %y), kind=kOutput, calls=%async_collective_fusion
  ROOT %f3 = bf16[8,4]{1,0} fusion(%x), kind=kCustom, calls=%fused_done
}

ENTRY %main (a: bf16[2,4]) -> bf16[2,4] {
  %a = bf16[2,4]{1,0} parameter(0)
  %w = (s32[], bf16[2,4]) while(%t0), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"10"}}
  ROOT %other = bf16[8,4]{1,0} fusion(%a), kind=kCustom, calls=%fused_done
}
"""  # noqa: E501


def test_the_steps_of_a_chain_are_one_collective():
    """In the loop's body, and again in the entry, where the chain is another one."""
    found = collective_instructions(HloModule(CHAINS), 4)
    assert [(c.kind, c.count, c.wire_bytes) for c in found] == [("all-gather", 10, 48), ("all-gather", 1, 48)]


SPARSE_CORE = """HloModule jit_step, is_scheduled=true

%called (p: bf16[2,4], t: token[]) -> bf16[8,4] {
  %t = token[] parameter(1)
  %p = bf16[2,4]{1,0} parameter(0)
  ROOT %g = bf16[8,4]{1,0} all-gather(%p), channel_id=2, replica_groups={{0,1,2,3}}, dimensions={0}
}, execution_thread="sparsecore"

ENTRY %main (a: bf16[2,4]) -> bf16[8,4] {
  %a = bf16[2,4]{1,0} parameter(0)
  %ready = token[] custom-call(), custom_call_target="PrepareAsyncCallDone"
  %s = ((bf16[2,4]{1,0}, token[]), bf16[8,4]{1,0}) call-start(%a, %ready), async_execution_thread="sparsecore", to_apply=%called
  ROOT %d = bf16[8,4]{1,0} call-done(%s)
}
"""  # noqa: E501


def test_a_call_that_the_sparse_core_runs_is_a_collective():
    (gather,) = collective_instructions(HloModule(SPARSE_CORE), 4)
    assert (gather.kind, gather.count, gather.wire_bytes, gather.groups) == ("all-gather", 1, 48, ((0, 1, 2, 3),))


WIDENING = """\
ENTRY %main (x: bf16[8,4], y: f32[8]) -> (f32[8,4], f32[8]) {
  %x = bf16[8,4]{1,0} parameter(0)
  %y = f32[8]{0} parameter(1)
  ROOT %sum = (f32[8,4]{1,0}, f32[8]{0}) all-reduce(%x, %y), replica_groups={{0,1},{2,3}}, to_apply=%add
}
"""


def test_an_all_reduce_that_widens_its_operands_is_read_in_the_dtype_of_its_results():
    (found,) = collective_instructions(HloModule(WIDENING), 4)
    assert (found.dtype, found.num_arrays, found.full_bytes) == ("f32", 2, 4 * (32 + 8))


MIXED = """HloModule jit_step, is_scheduled=true

ENTRY %main (a: s8[4,6], b: bf16[4,2]) -> s8[16,6] {
  %a = s8[4,6]{1,0} parameter(0)
  %b = bf16[4,2]{1,0} parameter(1)
  %g = (s8[16,6]{1,0}, bf16[16,2]{1,0}) all-gather(%a, %b), replica_groups={{0,1,2,3}}, dimensions={0}
  ROOT %r = s8[16,6]{1,0} get-tuple-element(%g), index=0
}
"""


def test_operands_of_one_collective_count_by_their_dtypes():
    (found,) = collective_instructions(HloModule(MIXED), 4)
    assert found.wire_bytes == (16 * 6 + 16 * 2 * 2) * 3 / 4
    rows = compiled_collectives([found], {"data": 4})
    assert [(row.dtype, row.count, row.bytes, row.result_bytes) for row in rows] == [
        ("s8", 1, 16 * 6 * 3 / 4, 16 * 6),
        ("bf16", 1, 16 * 2 * 2 * 3 / 4, 16 * 2 * 2),
    ]
