"""Two slices of two devices each: device n of one adds up with device n of the other."""

import math

from spmd_lm.analysis.compiled_collectives import collective_instructions
from spmd_lm.analysis.cross_slice import read_collectives_across_slices
from spmd_lm.analysis.exposed import Speeds, walk_schedule
from spmd_lm.analysis.hlo import HloModule
from spmd_lm.analysis.memory_traffic import KernelSpeeds

SPEEDS = Speeds(KernelSpeeds(1.0, math.inf), {"replica": 2, "data": 2}, lambda kind, axes: 1.0, lambda axes: False)
HOST = 'is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime"'
SUM = f'{HOST},_xla_host_transfer_rendezvous="psum_0",_xla_megascale_target="{{1,2}}x{{0:1}}",'
SUM += '_xla_megascale_transfer_type="ALL_REDUCE"}, metadata={op_name="jit(step)/gradients/psum"}'
PROGRAM = f"""HloModule step, is_scheduled=true

ENTRY %main (a: f32[3], x: f32[1,1], y: f32[1,5]) -> f32[3] {{
  %a = f32[3]{{0}} parameter(0)
  %x = f32[1,1]{{1,0}} parameter(1)
  %y = f32[1,5]{{1,0}} parameter(2)
  %t = token[] after-all()
  %s = (f32[3]{{0}}, u32[], token[]) send(%a, %t), channel_id=3, {SUM}
  %r = (f32[3]{{0}}, u32[], token[]) recv(%t), channel_id=2, {SUM}
  %dot = f32[1,5]{{1,0}} dot(%x, %y), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  %sd = token[] send-done(%s), channel_id=3, {HOST}}}
  %rd = (f32[3]{{0}}, token[]) recv-done(%r), channel_id=2, {HOST}}}
  ROOT %sum = f32[3]{{0}} get-tuple-element(%rd), index=0
}}
"""


def read(program: str = PROGRAM) -> tuple[HloModule, list[str]]:
    module = HloModule(program)
    return module, read_collectives_across_slices(module, ((0, 2), (1, 3)))


def test_a_send_and_a_receive_are_one_all_reduce():
    module, others = read()
    (found,) = collective_instructions(module, 4)
    assert (found.kind, found.dtype, found.wire_bytes, found.part) == ("all-reduce", "f32", 12, "gradients")
    assert found.axes(SPEEDS.sizes) == ("replica",) and others == []


def test_what_waits_for_the_receive_is_exposed():
    result = walk_schedule(read()[0], SPEEDS)
    assert (result["wire_seconds"], result["exposed_seconds"], result["step_seconds"]) == (12, 2, 12)
    (row,) = result["rows"]
    assert row["axes"] == ["replica"]


def test_nothing_travels_before_it_is_sent():
    """A compiler may post the receive first."""
    lines = PROGRAM.splitlines()
    first = next(line for line in lines if "recv(" in line)
    dot = next(line for line in lines if "dot(" in line)
    order = [line for line in lines if line not in (first, dot)]
    at = next(n for n, line in enumerate(order) if "send(" in line)
    program = "\n".join([*order[:at], first, dot, *order[at:]])
    assert walk_schedule(read(program)[0], SPEEDS)["step_seconds"] == 22


def test_other_transfers_are_named():
    """And what goes to a host's memory, and not to another slice, is none."""
    module, others = read(PROGRAM.replace("ALL_REDUCE", "ONE_TO_ONE"))
    assert not collective_instructions(module, 4) and others == ["ONE_TO_ONE"]
    assert read(PROGRAM.replace("_xla_megascale_transfer_type", "_xla_other"))[1] == []
