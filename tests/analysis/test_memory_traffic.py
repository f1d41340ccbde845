"""Bytes of kernels written by hand, by their kind."""

import pytest

from spmd_lm.analysis.hlo import HloModule
from spmd_lm.analysis.memory_traffic import KernelSpeeds, memory_traffic

INPUTS = """  %s = f32[8,100]{1,0} parameter(0)
  %u = f32[1,100]{1,0} parameter(1)
  %n = s32[] parameter(2)
"""
TABLES = """FileNames
1 "/x/spmd_lm/ops/norms.py"

FunctionNames
1 "norm"

FileLocations
1 {file_name_id=1 function_name_id=1 line=33 end_line=33 column=0 end_column=0}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

"""
SPEEDS = KernelSpeeds(flops=1e12, memory_bandwidth=4.0, attention=1e12, fused=2.0, overhead=1.0)


def computation(name: str, *lines: str) -> str:
    *body, last = (f"%{line}" for line in lines)
    text = "".join(f"  {line}\n" for line in body)
    return f"{name} (s: f32[8,100], u: f32[1,100], n: s32[]) -> f32[] {{\n{INPUTS}{text}  ROOT {last}\n}}\n\n"


def counted(*entry: str, fused: tuple[str, ...] = (), more: str = "") -> dict:
    called = computation("%called", *fused) if fused else ""
    text = f"HloModule step, is_scheduled=true\n\n{TABLES}{called}{more}{computation('ENTRY %main', *entry)}"
    return memory_traffic(HloModule(text), SPEEDS)


def of_fusion(*fused: str, result: str = "f32[8,100]", opcode: str = "fusion") -> tuple[str, float, float]:
    found = counted(f"f = {result} {opcode}(%s, %u, %n), kind=kLoop, calls=%called", fused=fused)
    (row,) = found["kinds"]
    assert found["bytes"] == row["bytes"] == row["read"] + row["written"]
    return row["kind"], row["read"], row["written"]


ZERO, ROW, ALL = "z = s32[] constant(0)", 400, 3200
UPDATE = "d = f32[8,100] dynamic-update-slice({base}, {value}, %n, %z)"
FUSIONS = {
    "an update in place": ("copies", ROW, ROW, ZERO, UPDATE.format(base="%s", value="%u")),
    "an update in place behind bitcasts": (
        *("copies", ROW, ROW, ZERO, "b = f32[8,100] bitcast(%s)"),
        *(UPDATE.format(base="%b", value="%u"), "e = f32[800] bitcast(%d)"),
    ),
    "an update of what was computed in the same kernel": (
        *("other kernels", ALL + ROW, ALL, ZERO, "b = f32[8,100] negate(%s)", UPDATE.format(base="%b", value="%u")),
    ),
    "adding to a row in place": (
        *("other kernels", 2 * ROW, ROW, ZERO),
        "r = f32[1,100] dynamic-slice(%s, %n, %z), dynamic_slice_sizes={1,100}",
        *("a = f32[1,100] add(%r, %u)", UPDATE.format(base="%s", value="%a")),
    ),
    "a dynamic slice": ("copies", ROW, ROW, ZERO, "r = f32[1,100] dynamic-slice(%s, %n, %z)"),
    "a slice behind a conversion and a bitcast": (
        *("other kernels", ROW, ROW // 2, "c = bf16[8,100] convert(%s)", "b = bf16[800] bitcast(%c)"),
        "r = bf16[100] slice(%b), slice={[100:200]}",
    ),
    "a gather from what is padded": (
        *("other kernels", 4 + 12, 12, ZERO, "p = f32[8,128] pad(%s, %z), padding=0_0x0_28"),
        "g = f32[3] gather(%p, %n), offset_dims={}",
    ),
    "a sum over all": ("other kernels", ALL, 32, ZERO, "r = f32[8] reduce(%s, %z), dimensions={1}, to_apply=%add"),
    "two results": (
        *("other kernels", ALL + ROW, ALL + ROW, "a = f32[8,100] negate(%s)", "b = f32[1,100] negate(%u)"),
        "t = (f32[8,100], f32[1,100]) tuple(%a, %b)",
    ),
    "a scatter adds to what it touches": (
        *("other kernels", ROW + 4 + ROW, ROW),
        "c = f32[8,100] scatter(%s, %n, %u), update_window_dims={1}, to_apply=%add",
    ),
    "a fill": ("fills", 0, ALL, ZERO, "b = f32[8,100] broadcast(%z), dimensions={}"),
}


@pytest.mark.parametrize("name", FUSIONS)
def test_a_fusion_moves_what_its_results_need(name):
    kind, read, written, *fused = FUSIONS[name]
    found_kind, found_read, found_written = of_fusion(*fused)
    slack = 4 if "z = " in fused[0] or "%n" in "".join(fused) else 0  # an index
    assert found_kind == kind and found_written == written
    assert found_read == pytest.approx(read, abs=slack)


def test_an_asynchronous_fusion_moves_as_much_and_its_end_nothing():
    fused = (ZERO, UPDATE.format(base="%s", value="%u"))
    result = "((f32[8,100], f32[1,100]), f32[8,100], u32[])"
    assert of_fusion(*fused, result=result, opcode="fusion-start") == of_fusion(*fused)
    start = f"f = {result} fusion-start(%s, %u, %n), kind=kLoop, calls=%called"
    both = counted(start, "e = f32[8,100] fusion-done(%f)", fused=fused)
    assert both["kinds"][0]["kernels"] == 1


GEMM = 'custom-call(%u, %s), custom_call_target="__cublas$lt$matmul", lhs_contracting_dims={1}'


def test_a_library_s_workspace_is_no_traffic():
    """In a call, and in one that is fused with the slices of its operands and the update that takes its result."""
    call = f"c = (f32[1,8], s8[4096]) {GEMM}"
    (row,) = counted(call)["kinds"]
    assert (row["kind"], row["read"], row["written"]) == ("products", ROW + ALL, 32)
    assert of_fusion(call, result="(f32[1,8], s8[4096])") == ("products", ROW + ALL, 32)
    taken = "g = f32[1,8] get-tuple-element(%c), index=0", "w = s8[4096] get-tuple-element(%c), index=1"
    assert of_fusion(call, *taken, "t = (f32[1,8], s8[4096]) tuple(%g, %w)") == ("products", ROW + ALL, 32)


ATTENTION = (
    'custom_call_target="__cudnn$fmhaSoftmax", backend_config={{"intermediate_tensor_shape": {{"element_type": "BF16", '
    '"dimensions": ["2", "3", "8", "8"]}}, "mask_type": "{mask}"}}'
)


@pytest.mark.parametrize(("mask", "share"), [("CAUSAL", 0.5), ("NO_MASK", 1.0)])
def test_attention_takes_as_long_as_its_flops(mask, share):
    call = f"c = (bf16[2,3,8,10], f32[2,3,8], u8[0]) custom-call(%s, %s, %s), {ATTENTION.format(mask=mask)}"
    speeds = SPEEDS._replace(attention=1.0, memory_bandwidth=1e12)
    module = HloModule(f"HloModule step\n\n{computation('ENTRY %main', call)}")
    found = memory_traffic(module, speeds)
    assert found["kinds"][0]["kind"] == "attention" and found["bytes"] == 3 * ALL + 2 * 3 * 8 * 10 * 2 + 2 * 3 * 8 * 4
    assert found["seconds"] == pytest.approx(4 * 2 * 3 * 8 * 8 * 10 * share + 1)


def test_a_buffer_that_is_allocated_is_not_written():
    assert counted('c = f32[8,100] custom-call(), custom_call_target="AllocateBuffer"')["kinds"] == []


def test_a_loop_moves_as_often_as_it_turns_and_kernels_have_a_source():
    body = computation("%body", 'c = f32[8,100] copy(%s), metadata={op_name="a/b" stack_frame_id=1}')
    known = 'backend_config={"known_trip_count":{"n":"7"}}'
    found = counted(f"w = f32[8,100] while(%s), condition=%none, body=%body, {known}", more=body)
    (row,) = found["kernels"]
    assert row["source"] == "/x/spmd_lm/ops/norms.py:33" and (row["count"], row["bytes"]) == (7, 7 * 2 * ALL)
    assert found["seconds"] == 7 * (2 * ALL / SPEEDS.memory_bandwidth + 1)
    assert counted("a = f32[8,100] add(%s, %s)")["seconds"] == 3 * ALL / SPEEDS.fused + 1
